"""Running a Flow under a Plan: cluster, wiring, the one loop, leases, the local runtime and the driver."""
