"""`rlplan calibrate`: a hardware profile fitted to a user's own measurements.

In: command-line words: run folders, logs of other frameworks each followed by its job, files of points. Out: a
Calibration, and its profile as a file. Left out: the fit (accuracy/calibrate.py).
"""

from collections.abc import Sequence
from pathlib import Path

from rlplan.accuracy.calibrate import SERVING, TRAINING, Calibration, Sample, calibrate, make_samples
from rlplan.accuracy.files.reading import read_points
from rlplan.accuracy.settings import find_gpu
from rlplan.errors import SpecError
from rlplan.foreign.logs.read import is_log, read_log
from rlplan.planner.answers.measured_step import MeasuredStep, explain_step
from rlplan.planner.plan import Plan
from rlplan.sources import JobWords, read_question, split_words
from rlplan.spec.hardware.catalogue import FOLDER_VARIABLE, find_profile, get_gpu
from rlplan.spec.hardware.profile import CpuProfile, GpuProfile, NodeProfile
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import Phase

OF_PHASE = {Phase.TRAIN: TRAINING, Phase.ROLLOUT: SERVING}
"""Phases whose seconds follow a group of fitted constants."""
JOBS = (".yaml", ".yml")


def calibrate_profile(words: Sequence[str], out: Path) -> Calibration:
    """Fit a profile to measurements. out: the folder for the profile.

    Raises: SpecError, raised before any prediction if the folder already has the profile; NoFeasiblePlanError.
    """
    sources, overrides = split_words(words)
    samples: list[Sample] = []
    unused: dict[str, int] = {}
    remaining, taken = list(sources), set[Path]()
    while remaining:
        path = Path(remaining.pop(0))
        if path.resolve() in taken:
            raise SpecError(
                f"{path} occurs twice",
                where="rlplan calibrate",
                rule="each measurement counts once",
                way_out="name it once; other settings need measurements of their own",
            )
        taken.add(path.resolve())
        if path.is_dir():
            from rlplan.report.run_folder import read_run_folder

            run = read_run_folder(path)
            samples += _sample_step(run.plan.asked, run.measured_step, path, out, run.plan)
        elif is_log(path) and remaining and remaining[0].endswith(JOBS):
            job = read_question("calibrate", JobWords(remaining.pop(0), list(overrides))).job
            samples += _sample_step(job, read_log(path), path, out)
        else:
            points = read_points(path)
            gpus = {gpu.name for point in points if (gpu := find_gpu(point)) is not None}
            if len(gpus) == 1:
                reserve_profile_path(gpus.pop(), out)
            usable, others = make_samples(points)
            samples += usable
            unused |= {why: unused.get(why, 0) + num for why, num in others.items()}
    return calibrate(samples, lambda name: get_gpu(name, where="the measurements"), unused)


def _sample_step(job: JobSpec, step: MeasuredStep, path: Path, out: Path, plan: Plan | None = None) -> list[Sample]:
    """Samples of each phase that was both measured and predicted. Raises: SpecError for a step without GPUs."""
    profile = find_profile(job.hardware.profile, where=f"{path}: hardware.profile")
    if isinstance(profile, CpuProfile):
        raise SpecError(
            f"{path} is a step on profile {profile.name}",
            where="rlplan calibrate",
            rule="free constants of a GPU's profile are fitted; a CPU host's are measured in a minute",
            way_out="rlplan profiles measure",
        )
    gpu = profile.gpu if isinstance(profile, NodeProfile) else profile.name
    reserve_profile_path(gpu, out)
    gaps = {gap.phase: gap for gap in explain_step(job, step, plan).gaps}
    return [
        Sample(f"{path}:{phase.value}", group, gpu, job.policy.path, gap.measured_s, gap.predicted_s)
        for phase, group in OF_PHASE.items()
        if (gap := gaps.get(phase.value)) and gap.measured_s > 0 and gap.predicted_s > 0
    ]


def reserve_profile_path(name: str, folder: Path) -> Path:
    """The file of a profile. Raises: SpecError if it exists, since profiles are never overwritten silently."""
    path = folder / f"{name}.yaml"
    if path.exists():
        raise SpecError(
            f"{path} exists already",
            where="rlplan calibrate --out",
            rule=f"a folder without a profile of that name, for {FOLDER_VARIABLE}",
            way_out="name another folder, or remove the file",
        )
    return path


def write_profile(profile: GpuProfile, folder: Path) -> Path:
    """Write a profile under its own name, used wherever RLPLAN_PROFILES names the folder. Raises: SpecError if it
    exists.
    """
    path = reserve_profile_path(profile.name, folder)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.model_dump_json(indent=1, exclude_none=True) + "\n", "utf-8")  # JSON is YAML
    return path
