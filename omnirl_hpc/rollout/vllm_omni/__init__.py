"""The vLLM-Omni engine, driven as a worker object inside the rank's own process. Nothing outside this folder
imports vllm.
"""
