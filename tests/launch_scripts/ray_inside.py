"""Uses Ray itself."""

import os

import ray

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
print("sum", ray.get(ray.remote(lambda: 1 + 2).remote()), "of rank", os.environ.get("RANK"))
ray.shutdown()
