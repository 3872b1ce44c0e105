"""What must hold after every scenario, read from the histories that all processes of a cluster wrote (V1-V9).

A history is a file of JSON lines, `<process>-<pid>.jsonl` below FUSION_HISTORY, written by `fusion.observe.history`.
Every line has `event`, `at_s` (CLOCK_MONOTONIC), `process` and `pid`, and by process:

worker (with `node`, `name`, `incarnation`, `job`, `epoch`, `stage` in every line)
    started     stages, resume_step (0: from the job's weights)
    message     kind, step, micro_batch, edge, source, message_epoch, message_job: one that was taken in whole
    step        step, applied, micro_batches (whose gradients were added up), loss (of the loss stage), digests (by name
                of parameter, buffer and optimizer or codec state: as it is after the step)
daemon (with `node`, `name`)
    registered  incarnation, self_fence_s
    answered    incarnation, sent_ago_s: a heartbeat was answered that left so long ago
    worker_started  job, epoch, stage, incarnation;  worker_exited  cause, detail
    said        level, text: of the agent's own log
coordinator
    committed   kind (JobPlanned, NodeGone, ...) and the event's short fields
all
    failpoint   name, action, and the place's values: just before it acts

V1 a step counts each micro-batch exactly once; V2 epochs never go back on a node; V3 no message of an older epoch is
taken; V4 the steps of the final lineage are without gap or repeat; V5 the loss of every step is that of the undisturbed
run; V6 never two workers for one stage, and none works after its lease; V7 parameters and optimizer state after every
step are those of the undisturbed run. V8 (nothing is left over) and V9 (each failure has one line that names cause and
node) look at the cluster itself, see faultcluster.py.
"""
