"""Plain classes that do the work of an RL step. None of them knows a loop, a queue, a device or the plan."""
