"""Samples for the tests of rewards, and texts that a policy might find instead of an answer."""

from __future__ import annotations

from typing import Any

from m2flow.rewards.math import MathReward
from m2flow.types import Sample, Task

RIGHT = "<think>three and four</think> <answer>so \\boxed{7}</answer>"
INJECTED = "m2flow-injected"  # a file that would be there if a text were run

ADVERSARIAL: dict[str, str] = {
    "empty": "",
    "whitespace": " \n\t \u00a0\u2003 ",
    "repetition": "the answer is " * 500,
    "repeated box": "\\boxed{3} " * 3000,
    "tags only": "<think></think><answer></answer>",
    "empty thought": "<think></think>3",
    "nested tags": "<think>" * 2000 + "x" + "</think>" * 2000,
    "all listed": " ".join(map(str, range(1, 101))),
    "all boxed": "\\boxed{" + ", ".join(map(str, range(1, 101))) + "}",
    "many boxes": " ".join(f"\\boxed{{{i}}}" for i in range(1, 2001)),
    "nested boxes": "\\boxed{" * 5000,
    "closed nested boxes": "\\boxed{" * 5000 + "3" + "}" * 5000,
    "braces": "\\boxed{" + "{" * 20000 + "}" * 20000,
    "import": f'\\boxed{{__import__("os").system("touch {INJECTED}")}}',
    "import, bare": f'__import__("os").system("touch {INJECTED}")',
    "import, as a symbol": f"\\boxed{{x + __import__('os').system('touch {INJECTED}')*0 + 7}}",
    "open": f"<answer>open('{INJECTED}', 'w')</answer>",
    "exec": f"\\boxed{{exec(\"open('{INJECTED}','w')\")}}",
    "write18": f"\\boxed{{\\immediate\\write18{{touch {INJECTED}}} 7}}",
    "power bomb": "\\boxed{10^{10^{10}}}",
    "tower": "\\boxed{9^{9^{9^{9^{9}}}}}",
    "factorial bomb": "\\boxed{((((9!)!)!)!)!}",
    "deep": "\\boxed{" + "(" * 400 + "7" + ")" * 400 + "+x}",
    "integral": "\\boxed{\\int_0^{\\infty} \\frac{\\sin(x^{x})}{e^{x^{3}} + \\cos x} dx}",
    "megabyte": "7 is not it " * 90_000,
    "megabyte of digits": "3" * 1_000_000,
    "megabyte of minus": "-" * 1_000_000,
    "megabyte of commas": "1," * 500_000,
    "megabyte of spaces": "\\boxed{" + " " * 1_000_000,
    "megabyte of backslashes": "\\" * 1_000_000,
    "megabyte of answers": "answer: " * 125_000,
    "unicode digits": "\\boxed{\u0667}",
    "other sevens": "\uff17 \u0967 \u2166 \u2087 \u2077 \U0001d7d5",
    "surrogates": "\\boxed{\ud800}",
    "null": "\\boxed{\x00}",
    "right to left": "\\boxed{\u202e7\u202c1}",
    "not a number": "\\boxed{nan}",
    "infinity": "\\boxed{\\infty}",
    "product in a row": "\\boxed{7 1}",
    "format string": "\\boxed{%s%n{0}}",
}


def sample(text: str, answer: Any = "7", length: int = 10, task: int = 1) -> Sample:
    """An attempt at a task whose right answer is `answer`."""
    return Sample(Task(task, {"prompt": "3+4=", "answer": answer}), 0, text, "stop", length)


def boxed(reward: MathReward, gold: str, answer: str) -> tuple[float, float]:
    """What a boxed answer is given, and how often the verifier failed on it."""
    got = reward.score([sample(f"\\boxed{{{answer}}}", gold)])
    return float(got["reward"][0]), float(got["error"][0] + got["timeout"][0])
