"""A client's weight in the average: functions of the client."""


def by_examples(client) -> float:
    return client.examples


def by_batches(client) -> float:
    return client.steps


def uniformly(client) -> float:
    return 1.0


WEIGHTINGS = {"samples": by_examples, "uniform": uniformly, "batches": by_batches}
