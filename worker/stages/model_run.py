"""The stages of one model's jobs, from the message to the acknowledged image."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from imagefleet import retry
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.storage.open import Storage
from worker import tasks
from worker.cost import CostMeter
from worker.engine import contract
from worker.gpu_thread import EngineThread
from worker.inputs.job_files import JobFiles
from worker.metrics import WorkerMetrics
from worker.node.self_check import NodeSelfCheck
from worker.node.watchdog import NodeWatchdog, Suspects
from worker.pull import Puller
from worker.settings import WorkerSettings
from worker.settle import Settler
from worker.stages.generate import GenerateStage
from worker.stages.prepare import PREPARERS, PrepareStage
from worker.stages.upload import ENCODING, UPLOADS, EncodeStage, UploadStage


@dataclass(frozen=True, slots=True)
class Shared:
    """The collaborators of a worker's stages that outlive a change of models."""

    storage: Storage
    settings: WorkerSettings
    files: JobFiles
    engine_thread: EngineThread
    puller: Puller
    settler: Settler
    metrics: WorkerMetrics
    cost: CostMeter
    watchdog: NodeWatchdog
    cancelled: CancelledCampaigns
    retry_policy: retry.RetryPolicy


@dataclass(frozen=True, slots=True)
class ModelRun:
    """The stages around one engine; each gives its work to the next."""

    prepare: PrepareStage
    generate: GenerateStage
    encode: EncodeStage
    upload: UploadStage

    @classmethod
    def of(
        cls, shared: Shared, engine: contract.Engine, model_hash: Future[str | None]
    ) -> ModelRun:
        """Stages for an engine whose model's file has *model_hash*."""
        settings, settler, metrics = shared.settings, shared.settler, shared.metrics
        blobs, policy = shared.storage.blobs, shared.retry_policy
        upload = UploadStage(
            blobs,
            settler,
            metrics,
            shared.cost,
            shared.watchdog,
            policy,
            settings.name,
            engine.model_name,
            Suspects(settings.name, blobs, metrics, policy),
        )
        encode = EncodeStage(
            engine.model_name, model_hash, upload, settler, metrics, shared.watchdog
        )
        generate = GenerateStage(
            engine,
            shared.engine_thread,
            encode,
            shared.puller,
            settler,
            metrics,
            shared.watchdog,
            shared.cancelled,
        )
        prepare = PrepareStage(
            engine, generate, shared.files, settler, metrics, settings.until_empty
        )
        return cls(prepare, generate, encode, upload)

    @property
    def checks(self) -> NodeSelfCheck:
        """The node's checks of its own images."""
        return self.generate.checks

    def start(self, side_tasks: tasks.SideTasks) -> None:
        """Starts the tasks of all stages."""
        pending = self.upload.settler.pending
        side_tasks.start("prepare", self.prepare.run, PREPARERS)
        side_tasks.start("generate", self.generate.run)
        side_tasks.start("encode", self.encode.run, ENCODING)
        side_tasks.start("upload", self.upload.run, UPLOADS)
        side_tasks.start("record", pending.run)
        side_tasks.start("acknowledge", pending.finish, UPLOADS)

    def close(self) -> None:
        """Ends the threads of the stages, whose tasks have ended."""
        self.prepare.close()
        self.encode.close()
