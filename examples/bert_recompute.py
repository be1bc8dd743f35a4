"""Recompute: drop activations of the forward, and compute them again in the backward (seed: training with very large batches).

fleetrun examples/bert_recompute.py --batch_size 53 --steps 20                                # Bert_large, on large GPUs
fleetrun examples/bert_recompute.py --small --max_seq_len 128 --batch_size 8 --steps 20       # on any machine
fleetrun examples/bert_recompute.py --data ./train_data --vocab ./vocab.txt --batch_size 53   # the seed's files
"""

import torch

import fleetx as X
from fleetx import fleet
from seed_loop import own_flags, train

parser = own_flags()
parser.add_argument("--small", action="store_true", help="four layers, 256 wide")
parser.add_argument("--max_seq_len", type=int, default=512, help="tokens in a sequence")
parser.add_argument("--vocab", default=None, help="vocab.txt (default: one is trained on the text)")
args, rest = parser.parse_known_args()

model = X.applications.Bert_large(**({"layers": 4, "hidden": 256, "heads": 4} if args.small else {}))

strategy = fleet.DistributedStrategy()
strategy.recompute = True
strategy.recompute_configs = {"checkpoints": model.checkpoints}

configs = X.parse_train_configs(rest, defaults={"data": "stdlib", "strategy": strategy}, parser=parser)
configs.refuse_rest()
fleet.init()

betas = (configs.beta1, configs.beta2)
optimizer = torch.optim.Adam(model.parameters(), lr=configs.lr, betas=betas, eps=configs.epsilon)
model, optimizer = fleet.distribute(model, optimizer, configs.strategy)

loader = model.load_digital_dataset_from_file(
    data_dir=configs.data,
    vocab_path=args.vocab,
    max_seq_len=args.max_seq_len,
    batch_size=configs.batch_size,
)
train(model, optimizer, loader, configs, args.steps)
