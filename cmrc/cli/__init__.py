"""The command line: `app` puts the commands together, `terminal` is what they share."""
