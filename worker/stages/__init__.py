"""The stages of a job's way through a worker: prepare, generate, encode, upload, record.

Every arrow between two stages is a bounded queue, so a slow stage holds back the one before it,
up to the engine and the pull. An error ends the job it belongs to, by its class; only NodeError
and SetupError leave a stage, and end the worker.
"""
