"""The version of cmrc, in one place."""

__version__ = "0.1.0"
