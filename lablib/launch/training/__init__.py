"""A trainer of one page and what it needs.

    trainer      the loop: global batch fixed, mean over tokens, agreed stop
    train_config its settings, and their command line
    token_data   the order of samples, windows of tokens, and what is trained
    metrics      metrics of every step, and MFU
    callbacks    what watches a run, checkpoints on a signal, resume, damaged files
    finetune     a local Hugging Face model, trained on prompts and answers
    lora         two thin trained matrices beside each frozen one

Read `trainer` first. Chapter 11.
"""

from lablib.launch.training.callbacks import (
    KillOnce,
    LogEvents,
    PrintSteps,
    Profile,
    SaveEvery,
    StopOnSignal,
    StragglerWatch,
    Validate,
    exit_code,
    resume,
)
from lablib.launch.training.finetune import (
    FineTuning,
    addition_examples,
    copy_settings,
    export_merged,
    read_examples,
    tiny_qwen2,
)
from lablib.launch.training.lora import add_lora, save_adapters
from lablib.launch.training.metrics import METRIC_KEYS, read_metrics
from lablib.launch.training.token_data import IGNORE_INDEX, SampleOrder, TokenWindows, open_tokens, text_tokens
from lablib.launch.training.train_config import TrainConfig, config_from_args, train_model, train_parser
from lablib.launch.training.trainer import Callback, Trainer

__all__ = [
    "IGNORE_INDEX",
    "METRIC_KEYS",
    "Callback",
    "FineTuning",
    "KillOnce",
    "LogEvents",
    "PrintSteps",
    "Profile",
    "SampleOrder",
    "SaveEvery",
    "StopOnSignal",
    "StragglerWatch",
    "TokenWindows",
    "TrainConfig",
    "Trainer",
    "Validate",
    "add_lora",
    "addition_examples",
    "config_from_args",
    "copy_settings",
    "exit_code",
    "export_merged",
    "open_tokens",
    "read_examples",
    "read_metrics",
    "resume",
    "save_adapters",
    "text_tokens",
    "tiny_qwen2",
    "train_model",
    "train_parser",
]
