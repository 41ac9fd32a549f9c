"""Faults injected into real MPI jobs: what each rank learns, and how soon."""
