"""Names of chat templates in other trainers, and ours (`data.chat_template`)."""

from collections.abc import Mapping

AXOLOTL: Mapping[str, str] = {
    "alpaca": "alpaca",
    "chatml": "chatml",
    "cohere": "command-r",
    "deepseek_v3": "deepseek-v3",
    "gemma": "gemma",
    "gemma3": "gemma3",
    "llama3": "llama3",
    "mistral_v1": "mistral-v1",
    "mistral_v2v3": "mistral-v3",
    "mistral_v3_tekken": "mistral-v3-tekken",
    "mistral_v7_tekken": "mistral-v7-tekken",
    "phi_3": "phi3",
    "phi_35": "phi3.5",
    "qwen3": "qwen3",
    "qwen_25": "qwen2.5",
}
"""`chat_template` of Axolotl."""

LLAMA_FACTORY: Mapping[str, str] = {
    "chatml": "chatml",
    "cohere": "command-r",
    "deepseek3": "deepseek-v3",
    "deepseekr1": "deepseek-r1",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3": "gemma3",
    "glm4": "glm4",
    "glm4_moe": "glm4.5",
    "gpt_oss": "gpt-oss",
    "llama2": "llama2",
    "llama3": "llama3",
    "mistral": "mistral-v3",
    "phi": "phi3",
    "phi4": "phi4",
    "qwen": "qwen2.5",
    "qwen3": "qwen3",
    "qwen3_nothink": "qwen3-instruct",
    "smollm2": "smollm2",
    "zephyr": "zephyr",
}
"""`template` of LLaMA-Factory."""
