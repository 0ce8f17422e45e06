"""A client's round with protected rows as the documentation says it: a loop over rows."""

import numpy as np
import torch
from torch import Tensor, nn

from stratagem.common.job import JobSpec
from stratagem.common.schema.json import thawed
from stratagem.common.strategy import Federated
from tests.reference.private_round import noised, normals, uniforms


def private_steps(
    job: JobSpec, model: nn.Module, rows: tuple[Tensor, Tensor], client: int, round_num: int
) -> list[int]:
    """Train `model` on (x, y) of a client by cross entropy and SGD; return the rows that each step
    has drawn. The noise is that of `noise: seeded`."""
    assert job.privacy is not None
    assert job.privacy.noise_multiplier is not None
    assert isinstance(job.strategy, Federated)
    (x, y), norm, params = rows, job.privacy.clip.norm, dict(model.named_parameters())
    trained = {name: param for name, param in params.items() if param.requires_grad}
    settings = {"lr": job.optimizer.lr, **thawed(job.optimizer.kwargs)}
    optimizer = torch.optim.SGD(list(trained.values()), **settings)
    rate, drawn = min(1.0, job.batch_size / len(x)), []
    for step in range(job.strategy.options.local_epochs * -(-len(x) // job.batch_size)):
        of_step = [str(round_num), str(client)]
        draws = uniforms(job.seed, ["draw", *of_step, str(len(x)), str(step)], len(x))[:, 0]
        chosen = [row for row in range(len(x)) if draws[row] < rate or rate == 1.0]
        sums = {name: torch.zeros_like(param).double() for name, param in trained.items()}
        for row in chosen:
            loss = nn.functional.cross_entropy(model(x[row : row + 1]), y[row : row + 1])
            found = torch.autograd.grad(loss, list(trained.values()))
            length = sum(float(grad.double().square().sum()) for grad in found) ** 0.5
            for total, grad in zip(sums.values(), found, strict=True):
                total += grad.double() * min(1.0, norm / length)
        for name, param in trained.items():
            names = ["rows", *of_step, str(step), "", name]
            noise = normals(uniforms(job.seed, names, param.numel()))
            whole, sigma = sums[name].numpy().ravel(), job.privacy.noise_multiplier * norm
            mean = noised(whole, sigma, noise) / (rate * len(x))
            param.grad = torch.from_numpy(np.asarray(mean)).reshape(param.shape).to(param.dtype)
        optimizer.step()
        drawn.append(len(chosen))
    return drawn
