"""Events in texts, LHE and HepMC: scan (where events begin) -> rows (bytes of events) -> lhe, hepmc (their values)."""
