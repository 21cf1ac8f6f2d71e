"""A tiny causal language model and trajectories of ragged answers, as the stages of language models write them."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import torch
from torch import nn

from m2flow.logits import categorical_entropy, categorical_logprob
from m2flow.types import Field, Score, Spec, Trajectory, Units

VOCABULARY, WIDTH, FEATURES = 6, 14, 4
# (tokens of the prompt, sampled tokens, tokens of a tool between the second and the third of them)
ANSWERS = ((2, 3, 0), (2, 1, 0), (2, 4, 2), (3, 2, 0), (3, 5, 0), (3, 3, 0), (1, 6, 3), (1, 2, 0))
GROUPS = (4, 4, 4, 9, 9, 9, 2, 2)
SCORES = (1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0, 0.0)
TRUNCATED = (False, False, True, False, True, False, False, False)


class TinyLM(nn.Module):
    """The state at a position is a mean over the embeddings up to there; `hidden` is said where no token is."""

    axes, chunk, noise = ("chunk",), 1, ("uniform", ())

    def __init__(self, seed: int, temperature: float = 1.0) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.spec = Spec({"tokens": Field((WIDTH,), "int64")}, Field((), "int64", categories=VOCABULARY))
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, FEATURES, generator=rng, dtype=torch.float64))
        self.readout = nn.Parameter(torch.randn(VOCABULARY, FEATURES, generator=rng, dtype=torch.float64))
        self.temperature, self.hidden = temperature, 0.0

    def features(self, obs):
        seen = self.embedding[obs["tokens"]].cumsum(1) / torch.arange(1, obs["tokens"].shape[1] + 1)[:, None]
        before = (obs["at"] - 1).clamp(min=0)
        return torch.tanh(2 * seen)[torch.arange(len(before))[:, None], before]

    def score(self, obs, record):
        logits = self.features(obs) @ self.readout.T
        action = obs["tokens"].gather(1, obs["at"])
        there = obs["at"] > 0
        logprob = categorical_logprob(logits=logits, action=action, temperature=self.temperature)
        entropy = categorical_entropy(logits=logits, temperature=self.temperature)
        return Score(torch.where(there, logprob, self.hidden), torch.where(there, entropy, self.hidden))


class TextModel(nn.Module):
    """The policy, a head with one output per token where an objective asks for a critic, and a reference."""

    def __init__(self, objective, seed: int = 0) -> None:
        super().__init__()
        self.policy = TinyLM(seed)
        self.reference = TinyLM(seed + 100).requires_grad_(False) if objective.needs_reference else None
        heads = objective.heads(self.policy.spec, self.policy.chunk)
        assert all(head.outputs == 1 for head in heads.values())
        rng = torch.Generator().manual_seed(seed + 1)
        weight = torch.randn(FEATURES, generator=rng, dtype=torch.float64)
        self.critic = nn.Parameter(weight) if heads else None

    def value(self, name, obs):
        there = obs["at"] > 0
        return torch.where(there, self.policy.features(obs) @ self.critic, self.policy.hidden)


def moved(model, seed: int, by: float = 0.3):
    """The same model some updates later."""
    later = copy.deepcopy(model)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in later.named_parameters():
            if not name.startswith("reference"):
                parameter += by * torch.randn(parameter.shape, generator=rng, dtype=parameter.dtype)
    return later


def trajectory(
    policy, *, seed: int = 0, answers=ANSWERS, groups=GROUPS, scores=SCORES, truncated=TRUNCATED, gap: float = 0.4
) -> Trajectory:
    """One answer a lane. `gap`: how far the log-probs of the engine that sampled are from those of the policy."""
    rng, size = np.random.default_rng(seed), len(answers)
    longest = max(sampled for _, sampled, _ in answers)
    tokens, at = np.zeros((size, WIDTH), np.int64), np.zeros((size, longest), np.int64)
    length, valid = np.zeros(size, np.int64), np.zeros((1, size, longest), bool)
    for i, (prompt, sampled, tool) in enumerate(answers):
        length[i] = prompt + sampled + tool
        tokens[i, : length[i]] = rng.integers(0, VOCABULARY, length[i])
        at[i, :sampled] = prompt + np.arange(sampled) + tool * (np.arange(sampled) >= 2)
        valid[0, i, :sampled] = True
    obs = {"tokens": tokens, "length": length, "at": at}
    with torch.no_grad():
        logprob = policy.score({name: torch.from_numpy(x) for name, x in obs.items()}, {}).logprob.numpy()
    logprob = np.where(valid[0], logprob + gap * rng.normal(size=logprob.shape), 0.0)
    reward = np.zeros(valid.shape, np.float32)
    reward[0, np.arange(size), valid[0].sum(1) - 1] = scores
    lanes = np.arange(size)[None]
    return Trajectory(
        obs=obs,
        obs_at=lanes,
        next_at=lanes,
        reward=reward,
        valid=valid,
        terminated=np.ones((1, size), bool),
        truncated=np.array([truncated]),
        version=np.zeros((1, size), np.int64),
        episode=50 + lanes,
        group=np.array([groups]),
        lane=lanes[0],
        units=Units(("chunk",), logprob, {}),
    )


def poisoned(given: Trajectory, value: float) -> Trajectory:
    """The same with `value` wherever no token is, and other tokens in the padding."""
    valid, tokens = given.valid, given.obs["tokens"].copy()
    tokens[np.arange(WIDTH) >= given.obs["length"][:, None]] = VOCABULARY - 1
    return dataclasses.replace(
        given,
        obs=given.obs | {"tokens": tokens},
        reward=np.where(valid, given.reward, np.float32(value)),
        units=dataclasses.replace(given.units, logprob=np.where(valid[0], given.units.logprob, value)),
    )


def lists(model, given: Trajectory):
    """Log-probs, entropies (and values) of each answer by itself, with gradients: one 1-d tensor per answer."""
    obs = {name: torch.from_numpy(x) for name, x in given.obs.items()}
    score = model.policy.score(obs, {})
    lengths = given.valid[0].sum(1).tolist()
    values = model.value("value", obs) if model.critic is not None else score.entropy
    behaviour = torch.from_numpy(given.units.logprob)
    parts = {"new": score.logprob, "entropy": score.entropy, "value": values, "behaviour": behaviour}
    if model.reference is not None:
        parts["reference"] = model.reference.score(obs, {}).logprob
    return {name: [x[i, :n] for i, n in enumerate(lengths)] for name, x in parts.items()}
