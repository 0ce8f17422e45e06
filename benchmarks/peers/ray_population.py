"""A population as a user of Ray Tune writes it: PopulationBasedTraining over a trainable class.

    python benchmarks/peers/ray_population.py 4 10 FOLDER

The members and their steps are those of `benchmarks/population.py`: a linear model, one step of SGD
and one evaluation a generation, a checkpoint after each. Everything that saves Ray time is set: no
dashboard, every member resident at once, actors that are used again.
"""

import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.population import build_model, load


class Member(tune.Trainable):  # type: ignore[misc]
    """One member; a step of Tune's is a generation."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = build_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config["lr"])
        self.data = load()

    def step(self) -> dict[str, float]:
        x, y = self.data["train"]
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(x), y).backward()
        self.optimizer.step()
        with torch.no_grad():
            x, y = self.data["test"]
            return {"loss": torch.nn.functional.mse_loss(self.model(x), y).item()}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        torch.save(self.model.state_dict(), Path(checkpoint_dir) / "state.pt")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        state = torch.load(Path(checkpoint_dir) / "state.pt", weights_only=True)
        self.model.load_state_dict(state)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.optimizer.param_groups[0]["lr"] = new_config["lr"]
        return True


def main(members: int, generations: int, folder: str) -> None:
    ray.init(num_cpus=members, include_dashboard=False, log_to_driver=False)
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=1,
        hyperparam_mutations={"lr": tune.loguniform(0.001, 0.1)},
        quantile_fraction=0.25,
    )
    tuner = tune.Tuner(
        Member,
        param_space={"lr": tune.loguniform(0.001, 0.1)},
        tune_config=tune.TuneConfig(
            num_samples=members,
            scheduler=scheduler,
            metric="loss",
            mode="min",
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            storage_path=folder,
            stop={"training_iteration": generations},
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
            verbose=0,
        ),
    )
    results = tuner.fit()
    assert not results.errors, results.errors
    print("best loss", results.get_best_result().metrics["loss"])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
