"""The parts of the router: what it knows of each replica, how fast replicas are, and the policies that choose one."""
