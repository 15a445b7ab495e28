"""Hugging Face Trainer: a small Llama, trained with a compiled AdamW whose states take one byte.

``optimizer_cls_and_kwargs`` gives Trainer the class and its arguments; Trainer makes the parameter groups, the schedule
and the checkpoints. Nothing is downloaded: the model has random weights, and the text is this file.

Run it with ``pip install transformers accelerate`` and ``python examples/hf_trainer.py``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import compiled_optim as co

LENGTH = 32


def main() -> None:
    """Train on the bytes of this file."""
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    rows = [{"input_ids": row, "labels": row} for row in text.unfold(0, LENGTH, 5)]
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=60,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            weight_decay=0.01,
            max_grad_norm=1.0,
            logging_steps=10,
            save_steps=30,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=LlamaForCausalLM(config),
            args=arguments,
            train_dataset=rows,
            optimizer_cls_and_kwargs=(co.AdamW, {"lr": 3e-3, "state_dtype": "8bit"}),
        )
        trainer.train()
        trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-30"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {float(losses[0]):.3f} at first, {float(losses[-1]):.3f} at the end")
    assert float(losses[-1]) < float(losses[0])
    optimizer = trainer.optimizer.optimizer  # accelerate wraps it
    print(optimizer.explain())


if __name__ == "__main__":
    main()
