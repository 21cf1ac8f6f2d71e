"""Environments. Each file adapts one foreign world to `m2flow.protocols.VectorEnv` and is imported by registry name.

Rules that hold for all of them (checked by tests/contracts/env_suite.py):
- Arrays of a `Step` belong to the caller: an env never writes to them again.
- `final_obs is obs` where no lane was reset within the step.
- Lane seeds depend on (run seed, global lane, k-th episode), never on how lanes are split (lanes.py).
- `Step.info["success"]` is bool [B] where the environment knows success.
"""
