"""HepMC event files."""
