"""Takes the local rank as an argument, as scripts of torch.distributed.launch do."""

import argparse
import json

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int, required=True)
parser.add_argument("--epochs", type=int)
print(json.dumps(vars(parser.parse_args())))
