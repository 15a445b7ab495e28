"""Step a compiled optimizer once and compare with torch: run with nothing installed but the wheel."""

import torch

import compiled_optim as co

assert ".venv" not in co.__file__, co.__file__
ours, theirs = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
theirs.load_state_dict(ours.state_dict())
for model, optimizer in ((ours, co.AdamW(ours, lr=0.1)), (theirs, torch.optim.AdamW(theirs.parameters(), lr=0.1))):
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    if model is ours:
        print(optimizer.explain())
torch.testing.assert_close(ours.weight, theirs.weight)
print("the installed wheel stepped an optimizer as torch does")
