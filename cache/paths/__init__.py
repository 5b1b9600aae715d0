"""Every way that pages travel between engine, device and host; each is a participant."""
