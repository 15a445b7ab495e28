"""Lightning: ``configure_optimizers`` returns a compiled optimizer, and nothing else changes.

It keeps a moving average of the weights in the pass of the step (``ema_decay``), and validates with it.

Run it with ``pip install lightning`` and ``python examples/lightning_module.py``.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import lightning
import torch
from torch import Tensor, nn

import compiled_optim as co


class Regression(lightning.LightningModule):
    """Learns the sum of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        """Return the loss of a batch."""
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        return loss

    def loss_of(self, batch: Tensor) -> Tensor:
        """Return the mean square of the error."""
        return (self.model(batch).squeeze(1) - batch.sum(1)).square().mean()

    def configure_optimizers(self) -> Any:
        """Return the optimizer and a schedule."""
        optimizer = co.AdamW(self.parameters(), lr=1e-2, ema_decay=0.99, ema_warmup=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    """Train, and evaluate the averaged weights."""
    warnings.filterwarnings("ignore", module="lightning")
    torch.manual_seed(0)
    module = Regression()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=200,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(3200, 8), batch_size=32))
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, co.Optimizer)
    data = torch.randn(1000, 8)
    with torch.no_grad(), optimizer.ema():
        averaged = module.loss_of(data).item()
    print(f"loss {module.losses[0]:.3f} at first, {module.losses[-1]:.4f} at the end, {averaged:.4f} averaged weights")
    assert module.losses[-1] < module.losses[0]
    print(optimizer.explain())


if __name__ == "__main__":
    main()
