"""Tools around the trainer: reports, benchmarks, studies, doctor, course. The trainer does not need them."""
