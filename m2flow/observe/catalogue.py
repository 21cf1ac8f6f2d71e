"""Every metric that m2flow itself writes, and no other: `name | unit | reduce/across | about`. `across` (replicas)
defaults to `reduce`.

Read by `m2flow.observe.metrics`, which explains the reductions. Add a line here for a new metric, and a run that writes
it to tests/integration/test_catalogue.py; another package calls `METRICS.declare(MetricInfo(...))`. `*` stands for any
text; an exact line wins over a pattern, a longer pattern over a shorter one.
"""

from __future__ import annotations

CATALOGUE = """
train/*_loss                 |           | mean      | one term of the loss, before its coefficient
train/value_loss             |           | mean      | squared (or Huber) error of the critic
train/alpha                  |           | mean      | entropy temperature
train/entropy                | nats      | mean      | entropy of the policy per unit
train/approx_kl              | nats      | mean      | k3 estimate of the divergence from the policy that acted
train/logprob_gap            | nats      | max       | largest gap of recorded and recomputed log-prob, same weights
train/logprob_gap_mean       | nats      | mean      | mean gap of recorded and recomputed log-prob, same weights
train/ratio_outside          | share     | mean      | units recomputed as under half or over twice as likely
train/behaviour_weight_mean  |           | mean      | weight of units: policy at the start of the step / that acted
train/behaviour_weight_max   |           | max       | largest of these weights, before behaviour_threshold
train/behaviour_outside      | share     | mean      | units that behaviour_rule truncated or left out
train/clip_fraction          | share     | mean      | units whose gradient the clip removed
train/grad_norm*             |           | mean      | gradient norm before clipping, by phase where there are several
train/lr*                    |           | mean      | learning rate
train/epochs                 | epochs    | last/max  | passes over the data before the target-KL stop
train/samples                | steps     | sum       | valid steps trained on
train/dead_groups            | share     | mean      | groups whose attempts all score alike, so they teach nothing
train/groups_*               | groups    | sum       | groups by what their scores are: kept (they differ), all_*
train/staleness              | versions  | mean      | weight versions between acting and training
train/explained_variance     |           | mean      | 1 - var(return - value) / var(return)
train/value_mean             | reward    | mean      | predicted value over valid steps
train/return_mean            | reward    | mean      | value target over valid steps
train/advantage_mean         |           | mean      | advantage over valid steps, before whitening
train/advantage_std          |           | mean      | spread of the advantage, before whitening
train/advantage_min          |           | min       | smallest advantage
train/advantage_max          |           | max       | largest advantage
train/q                      | reward    | mean      | predicted action value
train/q_target               | reward    | mean      | what the action value is fitted to

rollout/return               | reward    | mean      | undiscounted return of episodes that ended in this step
rollout/success              | share     | mean      | training episodes that succeeded
rollout/length               | env steps | mean      | length of episodes that ended in this step
rollout/episodes             | episodes  | sum       | episodes that ended in this step
rollout/env_steps            | env steps | sum       | environment steps taken, or answers of a language model
rollout/length_min           | tokens    | min       | shortest conversation, sampled tokens
rollout/length_max           | tokens    | max       | longest conversation, sampled tokens
rollout/truncated            | share     | mean      | conversations that the length limit cut
rollout/turns                | answers   | mean      | answers in a conversation
rollout/tokens               | tokens    | sum       | sampled tokens
rollout/tool_*               |           | mean      | calls of tools, and failed ones, in a conversation
rollout/rejected_*           | groups    | sum       | groups without spread that gave way to another task

reward/error                 | samples   | sum       | samples whose reward failed
reward/error_share           | share     | mean      | samples whose reward failed, of all
reward/timeout               | samples   | sum       | samples whose verification ran out of time
reward/timeout_share         | share     | mean      | samples whose verification ran out of time, of all
reward/*                     | reward    | mean      | a named component of the reward

eval/return                  | reward    | mean      | return of evaluation episodes
eval/length                  | env steps | mean      | length of evaluation episodes
eval/success_once            | share     | mean      | evaluation episodes that succeeded at any time
eval/success_at_end          | share     | mean      | evaluation episodes that stood in success at their last step
eval/success                 | share     | mean      | success by the definition of the protocol
eval/error_share             | share     | mean      | evaluation episodes whose reward failed: they count as no success
eval/timeout_share           | share     | mean      | evaluation episodes whose verification ran out of time
eval/episodes                | episodes  | sum       | evaluation episodes

time/step_s                  | s         | last/max  | wall time of the training step
time/total_s                 | s         | last/max  | wall time since the start of the run
time/*_s                     | s         | sum/max   | time in one stage; the slowest replica counts
throughput/env_steps_per_s   | 1/s       | last/sum  | environment steps per second of the training step
throughput/tokens_per_s      | 1/s       | last/sum  | sampled tokens per second of the training step
progress/env_steps           | env steps | last/max  | environment steps since the start of the run

alarm/*                      |           | sum       | alarms raised in this step
"""
