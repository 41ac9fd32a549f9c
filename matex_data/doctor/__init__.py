"""``matex doctor``: what a job finds on this machine, and what to change."""
