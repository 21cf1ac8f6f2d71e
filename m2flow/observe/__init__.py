"""What a run tells: metrics, traces, alarms, progress, and the report. Imports only `m2flow.types` at load."""
