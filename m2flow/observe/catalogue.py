"""Every metric that m2flow itself writes: `name | unit | reduce/across | about`. `across` (replicas) defaults to
`reduce`.

Read by `m2flow.observe.metrics`, which explains the reductions. Add a line here for a new metric; another package calls
`METRICS.declare(MetricInfo(...))`. `*` stands for any text; an exact line wins over a pattern, a longer pattern over a
shorter one.
"""

from __future__ import annotations

CATALOGUE = """
train/loss                   |           | mean      | total loss of an optimiser batch
train/*_loss                 |           | mean      | one term of the loss, before its coefficient
train/*_loss/*               |           | mean      | one term of the loss, by phase
train/loss/*                 |           | mean      | one term of the loss, before its coefficient
train/value_loss             |           | mean      | squared (or Huber) error of the critic
train/surrogate_loss         |           | mean      | clipped policy objective; it is maximised
train/alpha                  |           | mean      | entropy temperature
train/entropy*               | nats      | mean      | entropy of the policy per unit
train/approx_kl              | nats      | mean      | k3 estimate of the divergence from the policy that acted
train/kl*                    | nats      | mean      | divergence from a reference policy
train/logprob_gap*           | nats      | max       | largest gap of recorded and recomputed log-prob, same weights
train/logprob_gap_mean       | nats      | mean      | mean of the same gap
train/ratio                  |           | mean      | probability ratio of new and old policy
train/ratio_max              |           | max       | largest probability ratio
train/ratio_outside          | share     | mean      | units with a ratio outside [0.5, 2]
train/clip_fraction          | share     | mean      | units whose gradient the clip removed
train/grad_norm*             |           | mean      | gradient norm before clipping, by phase where there are several
train/lr*                    |           | mean      | learning rate
train/epochs                 | epochs    | last/max  | passes over the data before the target-KL stop
train/updates                | updates   | sum/max   | optimiser steps in this training step
train/samples                | steps     | sum       | valid steps trained on
train/dead_groups            | share     | mean      | groups whose attempts all score alike, so they teach nothing
train/groups_*               | groups    | sum       | groups by what their scores are: kept (they differ), all_*
train/staleness              | versions  | mean      | weight versions between acting and training
train/explained_variance     |           | mean      | 1 - var(return - value) / var(return)
train/value_mean             | reward    | mean      | predicted value over valid steps
train/return_mean            | reward    | mean      | value target over valid steps
train/reward_mean            | reward    | mean      | reward as trained on
train/advantage_mean         |           | mean      | advantage over valid steps, before whitening
train/advantage_std          |           | mean      | spread of the advantage, before whitening
train/advantage_min          |           | min       | smallest advantage
train/advantage_max          |           | max       | largest advantage
train/q                      | reward    | mean      | predicted action value
train/q_*                    | reward    | mean      | predicted action value or its target, by name

rollout/return               | reward    | mean      | undiscounted return of episodes that ended in this step
rollout/reward               | reward    | mean      | reward per environment step
rollout/success              | share     | mean      | training episodes that succeeded
rollout/success_*            | share     | mean      | training episodes that succeeded, by definition
rollout/length               | env steps | mean      | length of episodes that ended in this step
rollout/episodes             | episodes  | sum       | episodes that ended in this step
rollout/env_steps            | env steps | sum       | environment steps taken
rollout/dropped*             | episodes  | sum       | episodes thrown away, by reason
rollout/truncated            | share     | mean      | episodes that hit their time or length limit
rollout/failed_episodes      | episodes  | sum       | episodes lost to a failed environment process

reward/timeout               | samples   | sum       | samples whose reward ran out of time
reward/error                 | samples   | sum       | samples whose reward failed
reward/*                     | reward    | mean      | a named component of the reward

replay/size                  | steps     | last/sum  | transitions held
replay/added                 | steps     | sum       | transitions added in this step
replay/drawn                 | steps     | sum       | transitions sampled in this step
replay/*                     |           | mean      | state of the replay buffer

eval/return                  | reward    | mean      | return of evaluation episodes
eval/return_*                | reward    | mean      | spread, ends or interval of these returns
eval/length                  | env steps | mean      | length of evaluation episodes
eval/success_once            | share     | mean      | evaluation episodes that succeeded at any time
eval/success_at_end          | share     | mean      | evaluation episodes that stood in success at their last step
eval/success                 | share     | mean      | success by the definition of the protocol
eval/episodes                | episodes  | sum       | evaluation episodes
eval/*                       |           | mean      | another number of the evaluation protocol

time/step_s                  | s         | last/max  | wall time of the training step
time/total_s                 | s         | last/max  | wall time since the start of the run
time/*_s                     | s         | sum/max   | time in one stage; the slowest replica counts
throughput/*_per_s           | 1/s       | last/sum  | rate
utilisation/*                | share     | last/mean | busy time of a device or stage over the step's wall time
memory/*_mb                  | MB        | max       | peak memory
progress/env_steps           | env steps | last/max  | environment steps since the start of the run
progress/*                   |           | last/max  | counters since the start of the run

alarm/*                      |           | sum       | alarms raised in this step
"""
