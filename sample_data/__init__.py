"""Writers of small data sets."""
