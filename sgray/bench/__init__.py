"""Load generators and measurements: the engine alone (`offline`), a server over HTTP (`serve`)."""
