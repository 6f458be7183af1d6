"""Event files, as TensorBoard itself reads them."""

import warnings


def events_of(directory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return events
