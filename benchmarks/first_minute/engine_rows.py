"""What the rows of an engine draw, and for how long."""

from dataclasses import dataclass

from first_minute import bag


@dataclass(frozen=True, slots=True)
class EngineRow:
    """The jobs of a process, and how long it draws."""

    jobs: bag.Jobs
    #: The folder of its packages; rows that share one draw with the same graphs.
    packages: str
    family: bag.Family = "sd1"
    #: True if the folder is emptied before.
    is_cold: bool = False
    #: The minute from the process' start that is measured; 0: the time once it is ready.
    minute: int = 0
    #: Drawn once nothing is compiled any more, where no minute is given.
    steady_seconds: float = 30.0
    #: Jobs for which packages are compiled afterwards.
    then: bag.Jobs | None = None


ROWS = {
    "uniform": EngineRow("uniform", "uniform", is_cold=True),
    "bag_sizes_without_kernels": EngineRow(
        "sizes", "sizes", is_cold=True, minute=4, then="few_steps"
    ),
    "uniform_again": EngineRow("uniform", "sizes"),
    "bag_one_size": EngineRow("one_size", "sizes", minute=2),
    "bag_sizes": EngineRow("sizes", "sizes", minute=2),
    "bag_few_steps": EngineRow("few_steps", "sizes", minute=2),
    "sdxl_cold": EngineRow("sizes", "sdxl", "sdxl", is_cold=True),
    "sdxl_uniform": EngineRow("uniform", "sdxl_uniform", "sdxl"),
    "sdxl_bag_sizes": EngineRow("sizes", "sdxl", "sdxl", minute=3),
    "unlike": EngineRow("uniform", "uniform", steady_seconds=3.0),
}
