"""Other names of settings: those of other tools, and those of earlier versions."""

# What users of other tools type, and what it is called here.
RATIOS = ("join_ratio", "fraction_fit", "fraction_train", "eligible_perc", "participation", "sample_ratio", "frac")
ALIASES = {
    **dict.fromkeys(("dataset", "dataset.name", "data_name", "data.name"), "data"),
    **dict.fromkeys(("num_clients", "n_clients", "client_num", "num_supernodes", "population"), "clients"),
    **dict.fromkeys((*RATIOS, "clients_per_round", "num_sampled"), "cohort"),
    **dict.fromkeys(("method", "method.name", "algo", "strategy", "alg", "algorithm.name"), "algorithm"),
    **dict.fromkeys(
        ("global_rounds", "num_server_rounds", "n_rounds", "num_rounds", "global_epochs", "comm_rounds"), "rounds"
    ),
    **dict.fromkeys(("local_epochs", "local_epoch", "epochs"), "local.epochs"),
    **dict.fromkeys(("local_steps", "steps"), "local.steps"),
    **dict.fromkeys(("batch_size", "local.size", "local_batch_size"), "local.batch_size"),
    **dict.fromkeys(("lr", "learning_rate", "local_learning_rate", "local.learning_rate", "optimizer.lr"), "local.lr"),
    **dict.fromkeys(("momentum", "optimizer.momentum"), "local.momentum"),
    **dict.fromkeys(("weight_decay", "wd", "optimizer.weight_decay"), "local.weight_decay"),
    **dict.fromkeys(("optimizer", "optimizer.name"), "local.optimizer"),
    **dict.fromkeys(("schedule", "lr_schedule"), "local.schedule"),
    **dict.fromkeys(("alpha", "dirichlet_alpha"), "partition.alpha"),
    "partition.name": "partition",
    **dict.fromkeys(("network", "net", "model_name", "model.name"), "model"),
    **dict.fromkeys(("output", "output_dir", "out_dir", "name"), "out"),
    **dict.fromkeys(("random_seed", "rng_seed"), "seed"),
    "eval_every": "evaluate.every",
    **dict.fromkeys(("defence", "defense", "defenses"), "defences"),
    "attack.kind": "attack",
}
# What papers and other tools call the last part of a key, for a better suggestion.
SYNONYMS: dict[str, str] = dict.fromkeys(("eta", "learning_rate", "rate", "stepsize", "step_size"), "lr")
# Keys that were called otherwise in an earlier version: understood everywhere, and a word gets a note.
RENAMED = {
    "policy.least": "policy.min_replies",
    "policy.failures": "policy.max_failures",
    "policy.rest": "policy.cooldown",
    "policy.largest": "policy.max_reply_mib",
    "policy.claim": "policy.max_weight_share",
}
