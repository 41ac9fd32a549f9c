"""Arrow IPC files and streams, Feather among them."""
