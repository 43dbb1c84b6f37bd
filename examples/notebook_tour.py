# %% [markdown]
# # A tour in a notebook
# Each `# %%` is a cell: open this file in Jupyter (with jupytext) or VS Code, or run it as a script. The last line of a cell shows itself.
# It makes training artifacts, trains them in PyTorch, and looks at what changed. It needs no onnxruntime.

# %%
from pathlib import Path

import torch

import torch_ort_ckpt as toc
from torch_ort_ckpt.cli.demo import data, network  # a LeNet-5, and digits

folder = Path("tour")

# %% Training artifacts from a PyTorch module: inputs, parameters, optimizer
artifacts = toc.export_artifacts(network(), data()[0], folder / "artifacts", overwrite=True)
artifacts  # noqa: B018

# %% The artifacts as an nn.Module
model = toc.OrtModule(artifacts)
optimizer = toc.OrtOptimizer(model, lr=1e-3)
model  # noqa: B018

# %% An ordinary loop
losses = []
for seed in range(60):
    loss = model(*data(seed))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss.detach()))
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")

# %% The checkpoint that an app continues from
toc.save(model.checkpoint(optimizer), folder / "trained")
state = toc.load(folder / "trained")
state  # noqa: B018

# %% What changed
change = toc.diff(folder / "artifacts" / "checkpoint", folder / "trained")
change  # noqa: B018

# %% The same as a page for a browser
from torch_ort_ckpt import report  # noqa: E402

report.write(report.comparison(folder / "artifacts" / "checkpoint", folder / "trained")[0], folder / "change.html", overwrite=True)

# %% Predictions in plain PyTorch
predict = toc.to_torch_module(artifacts, outputs=["output"])
predict.load_state_dict(toc.to_state_dict(state, module=predict))
images, labels = data(10_000, 500)
with torch.no_grad():
    print(f"{float((predict(images).argmax(1) == labels).float().mean()):.0%} of new digits right")
