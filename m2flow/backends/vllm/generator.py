"""The section `generator: {name: vllm}`, and the Generator that it builds.

    submit -> add_request (prompt ids, stop ids, seed) -> step -> new ids and their log-probs -> Answer

Weights arrive like everywhere, are put into the policy's module, and go from there into the engine under the names of
the checkpoint, or as an adapter. Then the engine must say what the module says of a few probe tokens: an engine that
silently kept an old tensor (the output head of a model with tied embeddings, for instance) ends the run instead of
spoiling it.

vLLM draws with generators of its own, so an answer depends on the request's seed but is not the one that another
Generator gives, and is as exact as vLLM's arithmetic: see docs/vllm.md.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from m2flow.backends.vllm import adapter, engine
from m2flow.seeds import derive
from m2flow.types import Answer, Array, Request, Score, Weights

# Mean difference of log-probs, in nats, that rounding in the engine's dtype explains; docs/vllm.md says what it was.
BOUNDS: Mapping[str, float] = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.2}
PROBES, PROBE_PROMPT = 4, 8  # answers of a check, and ids before each of them


class LanguageModel(Protocol):
    """What a policy must offer to be served by vLLM, besides being a torch module (see `models.lm`)."""

    temperature: float
    constant: frozenset[str]  # names of its state that are never published
    config: Any  # `config.lora` has rank and alpha of its adapters, or is None; read with `lora: adapter` only

    def save_pretrained(self, folder: Path) -> None:
        """Write what `from_pretrained` of transformers opens."""

    def hf_weights(self) -> Iterator[tuple[str, Array]]:
        """Every tensor under its name in the checkpoint: adapters merged, tied ones under both of their names."""

    def score(self, obs: Mapping[str, Array], record: Mapping[str, Array]) -> Score:
        """See `protocols.Scorer`."""

    def parameters(self) -> Iterator[Any]:
        """Of a torch module."""

    def state_dict(self) -> Mapping[str, Array]:
        """Of a torch module."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Of a torch module; does without what is `constant`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMGeneratorConfig:
    """vLLM, in this process. It takes the model from the policy, so nothing here names one."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # of the engine's weights and arithmetic
    max_context: int | None = None  # tokens of prompt and answer together; null: what the model was made for
    max_sequences: int = 256  # answers in the running batch; more wait in order
    gpu_memory_utilisation: float = 0.4  # share of a GPU's memory that the engine takes
    kv_cache_gb: float | None = None  # GiB of keys and values; null: what the share leaves on a GPU, 1 on a CPU
    enforce_eager: bool = True  # false: compile the model first, half a minute for a small one; quicker afterwards
    tensor_parallel: int = 1  # devices that one engine is cut over
    lora: Literal["merged", "adapter"] = "merged"  # how policy.lora is served: in the weights, or beside them
    sleep: bool = False  # leave the GPU between generations (plans that lend devices); no CPU build can
    seed: int = 0  # of the engine; answers are seeded by their requests
    check_tokens: int = 8  # tokens of each probe after new weights, engine against policy; 0: no check
    check_bound: float | None = None  # mean difference of log-probs (nats) that ends a run; null: by dtype

    def __post_init__(self) -> None:
        for name, least in (("max_sequences", 1), ("tensor_parallel", 1), ("check_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: must be at least {least}, got {getattr(self, name)}")
        if self.max_context is not None and self.max_context < self.check_tokens + PROBE_PROMPT:
            least = self.check_tokens + PROBE_PROMPT
            raise ValueError(
                f"max_context: must be at least {least} (check_tokens + {PROBE_PROMPT}), got {self.max_context}"
            )
        if not 0.0 < self.gpu_memory_utilisation <= 1.0:
            raise ValueError(f"gpu_memory_utilisation: must be in (0, 1], got {self.gpu_memory_utilisation}")
        for name in ("kv_cache_gb", "check_bound"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ValueError(f"{name}: must be more than 0 and finite, or null for the default, got {value}")

    def build(self, policy: LanguageModel) -> VLLMGenerator:
        """An engine with the policy's present weights, checked against it. It owns `policy` from now on.

        Raises:
            ValueError: `sleep` where vLLM cannot, `lora: adapter` without adapters, or what vLLM refuses.
        """
        settings: dict[str, Any] = {
            "dtype": self.dtype,
            "max_model_len": self.max_context,
            "max_num_seqs": self.max_sequences,
            "gpu_memory_utilization": self.gpu_memory_utilisation,
            "enforce_eager": self.enforce_eager,
            "tensor_parallel_size": self.tensor_parallel,
            "seed": self.seed,
        }
        if self.lora == "adapter":
            settings |= {"enable_lora": True, "max_lora_rank": adapter.buffer_rank(policy.config.lora)}
        room = None if self.kv_cache_gb is None else int(self.kv_cache_gb * 2**30)
        with tempfile.TemporaryDirectory(prefix="m2flow-vllm-") as folder:
            policy.save_pretrained(Path(folder))
            started = engine.start(folder, kv_cache_bytes=room, sleep=self.sleep, **settings)
        return VLLMGenerator(started, policy, self)

    @property
    def bound(self) -> float:
        """Mean difference of log-probs, in nats, beyond which the engine does not have the policy's weights."""
        return BOUNDS[self.dtype] if self.check_bound is None else self.check_bound


@dataclass(slots=True)
class _Flight:
    """A request in the engine, and what it has got so far."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request) -> _Flight:
        """With what the request had got before."""
        begun = request.begun
        parts = ((), (), ()) if begun is None else (begun.tokens, begun.logprob, begun.version)
        tokens, logprob, version = (np.asarray(part).tolist() for part in parts)
        return cls(request, tokens, logprob, version)

    @property
    def finish(self) -> Literal["stop", "length"] | None:
        """How it has ended; None: it goes on."""
        if self.tokens and self.tokens[-1] in self.request.stop:
            return "stop"
        return "length" if len(self.tokens) >= self.request.max_tokens else None

    def answer(self, finish: Literal["stop", "length", "abort"]) -> Answer:
        tokens, version = np.array(self.tokens, np.int64), np.array(self.version, np.int64)
        return Answer(self.request.id, tokens, np.array(self.logprob, np.float64), version, finish)


class VLLMGenerator:
    """See `protocols.Generator` and, for `onload` and `offload`, `protocols.Resident`."""

    def __init__(self, started: Any, policy: LanguageModel, config: VLLMGeneratorConfig) -> None:
        self.engine = started
        self.policy = policy
        self.config = config
        self.version = 0
        self.asleep = False
        model = started.vllm_config.model_config
        self.vocabulary, self.max_context = int(model.get_vocab_size()), int(model.max_model_len)
        self._flights: dict[str, _Flight] = {}  # by the engine's name of them, in the order of their submission
        self._ended: list[_Flight] = []  # those that had ended before they were submitted
        self._names = itertools.count(1)
        self._served: Any = None  # the LoRARequest that all requests go with, with `lora: adapter`
        self._folder = tempfile.TemporaryDirectory(prefix="m2flow-vllm-")  # of adapters
        if config.lora == "adapter":
            self._send()
        self.difference = self._check()  # mean of the last check, in nats

    def submit(self, requests: Sequence[Request]) -> None:
        """See `protocols.Generator`.

        Raises:
            ValueError: a request that cannot be served; none of `requests` is taken then.
        """
        taken = {flight.request.id for flight in [*self._flights.values(), *self._ended]}
        for request in requests:
            if request.id in taken:
                raise ValueError(f"request {request.id}: its id is in flight already")
            fault = self._fault(request)
            if fault:
                raise ValueError(f"request {request.id}: {fault}")
            taken.add(request.id)
        for request in requests:
            flight = _Flight.of(request)
            if flight.finish is None:
                self._start(flight)
            else:
                self._ended.append(flight)

    def _fault(self, request: Request) -> str:
        """Why it cannot be served; empty: it can."""
        prompt, begun = np.asarray(request.prompt), request.begun
        if not len(prompt):
            return "its prompt has no token; give at least one"
        if prompt.min() < 0 or prompt.max() >= self.vocabulary:
            return f"its prompt has ids outside the model's 0..{self.vocabulary - 1}"
        if request.max_tokens < 1:
            return f"max_tokens: must be at least 1, got {request.max_tokens}"
        if len(prompt) + request.max_tokens > self.max_context:
            return (
                f"max_tokens: {request.max_tokens} after a prompt of {len(prompt)} is more than {self.max_context}; "
                "raise generator.max_context as far as the model goes, or lower env.max_tokens"
            )
        if request.temperature != 0.0 and not 0.01 <= request.temperature <= 2.0:  # below, it would silently be 0.01
            return f"temperature: {request.temperature}; vLLM draws at 0.01 to 2, or takes the best token at 0"
        if begun is not None and len(begun.tokens) > request.max_tokens:
            return f"it had begun with {len(begun.tokens)} tokens, more than its max_tokens: {request.max_tokens}"
        return ""

    def _start(self, flight: _Flight) -> None:
        """Hand a request to the engine, to go on behind what it has got."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request, got = flight.request, len(flight.tokens)
        name = f"{request.id}-{next(self._names)}"
        self._flights[name] = flight
        if self.asleep:  # it goes to the engine when that is back
            return
        params = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens - got,
            stop_token_ids=sorted(request.stop),
            ignore_eos=True,  # the model's own idea of an end is in `stop` or it is none
            seed=derive(request.seed, "vllm", got),  # an answer that goes on must not draw its first numbers again
            logprobs=0,  # of the token drawn, and no others
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = [*np.asarray(request.prompt).tolist(), *flight.tokens]
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params, lora_request=self._served)

    def step(self) -> list[Answer]:
        """See `protocols.Generator`: one step of the engine, at most one token of each request."""
        ended = [flight.answer(flight.finish or "length") for flight in self._ended]
        self._ended.clear()
        if not self._flights:
            return ended
        if self.asleep:
            raise RuntimeError("step: the engine is asleep; its device must be lent to it first (onload)")
        return ended + self._advance()

    def _advance(self) -> list[Answer]:
        """One step of the engine; the answers that it ended."""
        with torch.random.fork_rng(devices=[]):  # see `engine.undisturbed`
            outputs = self.engine.step()
        return [answer for output in outputs for answer in self._take(output)]

    def _take(self, output: Any) -> Iterator[Answer]:
        """Note what a request has got; its answer, where that was the last of it."""
        flight = self._flights.get(output.request_id)
        if flight is None:  # aborted while the engine was at it
            return
        part = output.outputs[0]
        for token, ranked in zip(part.token_ids, part.logprobs or (), strict=True):
            flight.tokens.append(int(token))
            flight.logprob.append(float(ranked[token].logprob))
            flight.version.append(self.version)
        if output.finished:
            del self._flights[output.request_id]
            if part.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"vLLM ended request {flight.request.id} with {part.finish_reason!r}")
            yield flight.answer(part.finish_reason)

    def abort(self, ids: Sequence[int] | None = None) -> list[Answer]:
        """See `protocols.Generator`; ids that are not in flight any more are passed over."""
        had = [flight for flight in self._ended if ids is None or flight.request.id in ids]
        self._ended = [flight for flight in self._ended if flight not in had]
        return [flight.answer("abort") for flight in [*had, *self._withdraw(ids)]]

    def _withdraw(self, ids: Sequence[int] | None = None) -> list[_Flight]:
        """Take requests out of the engine."""
        wanted = [name for name, flight in self._flights.items() if ids is None or flight.request.id in ids]
        self.engine.abort_request(wanted)
        return [self._flights.pop(name) for name in wanted]

    def load(self, weights: Weights) -> None:
        """See `protocols.Generator`. Takes those named "policy.<name>", for all names of the policy but its constants.

        Raises:
            ValueError: they are of another policy; the old ones stay.
            RuntimeError: the engine does not say what the policy says with them.
        """
        state = self.policy.state_dict()
        arrays = {n[7:]: torch.as_tensor(x) for n, x in weights.arrays.items() if n.startswith("policy.")}
        wrong = sorted((state.keys() - self.policy.constant) ^ arrays.keys())
        wrong = wrong or [n for n, x in arrays.items() if x.shape != state[n].shape]
        if wrong:
            raise ValueError(f"weights of version {weights.version}: {', '.join(wrong[:5])} do not fit this policy")
        self.policy.load_state_dict(arrays, strict=True)
        if not self.asleep:
            self._refresh()
        self.version = weights.version

    def _refresh(self) -> None:
        """The policy's weights into the engine, nothing of the old ones kept, and requests on with the new ones."""
        held = self._withdraw()
        self._send()
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache, which holds keys and values of the old weights")
        self.difference = self._check()
        for flight in held:  # behind their own tokens, whose keys and values the engine computes again
            self._start(flight)

    def _send(self) -> None:
        if self.config.lora == "adapter":
            self._send_adapter()
            return
        stream: Any = ((name, tensor.detach()) for name, tensor in self.policy.hf_weights())
        if self.config.tensor_parallel > 1:  # other processes: no iterator goes there
            stream = list(stream)
        # The worker's own method. A CPU build has repacked its tensors, and `load_weights` of the model would not fit.
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})

    def _send_adapter(self) -> None:
        from vllm.lora.request import LoRARequest

        number = next(self._names)
        folder = Path(self._folder.name) / str(number)
        adapter.write(self.policy.state_dict(), self.policy.config.lora, folder)
        old, self._served = self._served, LoRARequest(str(number), number, str(folder))
        if old is not None:
            self.engine.remove_lora(old.lora_int_id)
            shutil.rmtree(old.lora_path)
        self.engine.add_lora(self._served)

    @torch.no_grad()
    def _check(self) -> float:
        """Mean difference of log-probs between engine and policy on tokens that the engine draws, in nats."""
        count = self.config.check_tokens
        if not count:
            return 0.0
        prompts = np.random.default_rng(0).integers(self.vocabulary, size=(PROBES, PROBE_PROMPT))
        at_temperature = self.policy.temperature
        for row, prompt in enumerate(prompts):
            self._start(_Flight(Request(-1 - row, prompt, count, frozenset(), row, at_temperature)))
        answers: list[Answer] = []
        while self._flights:
            answers += self._advance()  # not `step`: what it hands out besides is of other requests, whose answers wait
        answers.sort(key=lambda answer: -answer.id)
        tokens = np.concatenate([prompts, np.stack([answer.tokens for answer in answers])], axis=1)
        at = np.tile(np.arange(PROBE_PROMPT, PROBE_PROMPT + count), (PROBES, 1))
        obs = {"tokens": tokens, "length": np.full(PROBES, tokens.shape[1]), "at": at}
        device = next(iter(self.policy.parameters())).device
        score = self.policy.score({name: torch.from_numpy(x).to(device) for name, x in obs.items()}, {})
        theirs = np.stack([answer.logprob for answer in answers])
        difference = float(np.abs(theirs - score.logprob.double().cpu().numpy()).mean())
        if not difference <= self.config.bound:  # not a number is wrong too
            raise RuntimeError(
                f"vLLM's log-probs differ from the policy's by {difference:.3g} on average, more than "
                f"generator.check_bound ({self.config.bound:g}): the engine has not taken all weights, or computes "
                "something else"
            )
        return difference

    def offload(self) -> None:
        """Leave the GPU, with `sleep: true`; without it vLLM cannot, and nothing happens. Requests are held."""
        if self.config.sleep and not self.asleep:
            held = self._withdraw()
            # Full weights are the policy's and need not be kept twice; those under an adapter are vLLM's alone.
            self.engine.sleep(level=1 if self.config.lora == "adapter" else 2)
            self.asleep = True
            for flight in held:
                self._start(flight)

    def onload(self) -> None:
        """Back on the GPU with the policy's weights; requests go on."""
        if self.asleep:
            self.engine.wake_up()
            self.asleep = False
            self._refresh()

    def close(self) -> None:
        """Free the engine."""
        self._flights.clear()
        engine.stop(self.engine)
        self._folder.cleanup()
