"""Communicators, error agreement, deadlines for every wait, and the end of a job."""
