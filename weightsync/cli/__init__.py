"""The command line: `weightsync --help`."""
