"""vLLM as a Generator: the same adapter for its builds for CPUs and for GPUs. See docs/vllm.md.

generator.py is the config and the Generator, engine.py starts an engine, adapter.py writes LoRA adapters for it.
"""

from m2flow.backends.vllm.generator import VLLMGenerator, VLLMGeneratorConfig

__all__ = ["VLLMGenerator", "VLLMGeneratorConfig"]
