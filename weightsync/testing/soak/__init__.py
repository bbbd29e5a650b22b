"""Random updates with random faults for a given time, reproducible from a seed."""
