"""What is known of the packages that the environment pins: `python -m tests.supply` asks PyPI."""
