"""Pre-train a BERT on your own text at a large batch: LAMB or Muon, warm-up and decay, evaluation, exact resume, a monitor.

The data is a folder of text files, with folders `train` and `val` in it or without; a vocabulary is trained on it.

fleetrun examples/pretrain_text.py texts                                                  # BERT-base, on all GPUs
fleetrun examples/pretrain_text.py texts --budget 20GB --batch_size 96                    # a batch that would not fit
fleetrun examples/pretrain_text.py stdlib --layers 2 --hidden 128 --max_seq_len 64 --batch_size 16 --epochs 1   # to try it

Run the same line again to continue after a stop. The result, runs/pretrain/model, is what finetune_text.py begins with;
transformers reads it too: BertForPreTraining.from_pretrained("runs/pretrain/model").
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import torch

import fleetx as X
from fleetx import fleet
from fleetx.optim.schedules import Polynomial, sqrt_scaled_lr


def read_flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help='folder of text files, or "stdlib": Python\'s own sources, to try the script')
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab_size", type=int, default=30522)
    parser.add_argument("--max_seq_len", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=32, help="sequences of a micro-batch on one worker")
    parser.add_argument("--merge", type=int, default=1, help="micro-batches that make one update")
    parser.add_argument("--budget", help="memory of one worker, such as 20GB: as much as needed for it is computed twice")
    parser.add_argument(
        "--lr", type=float, default=6e-4, help="rate at 512 sequences an update; it grows with the root of the batch"
    )
    parser.add_argument("--muon", action="store_true", help="Muon for matrices and AdamW for the rest, in place of LAMB")
    parser.add_argument("--run", default="runs/pretrain", type=Path, help="folder of curves, checkpoints and the trained model")
    parser.add_argument("--save_every", type=int, default=1000, help="micro-batches between two checkpoints")
    return parser.parse_args()


def build_strategy(args):
    strategy = fleet.DistributedStrategy(lamb=not args.muon, muon=args.muon, clip_norm=True)
    strategy.amp = fleet.device().type == "cuda"  # bfloat16; most CPUs are slower with it
    if args.merge > 1:
        strategy.gradient_merge = True
        strategy.gradient_merge_configs = {"k_steps": args.merge}
    if args.budget:
        strategy.recompute = True
        strategy.recompute_configs = {"budget": args.budget}
    return strategy


def save_for_transformers(folder, model, optimizer):
    """Write weights, vocabulary and a config.json; every worker must call it."""
    if fleet.is_first_worker():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(model.vocabulary_file, folder / "vocab.txt")
        config = {
            "model_type": "bert", "architectures": ["BertForPreTraining"], "vocab_size": model.config.vocab_size,
            "num_hidden_layers": model.config.layers, "hidden_size": model.config.hidden,
            "num_attention_heads": model.config.heads, "intermediate_size": 4 * model.config.hidden,
            "max_position_embeddings": model.config.max_position,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    fleet.barrier_worker()
    fleet.save_model(folder / "model.safetensors", model, optimizer)


def main():
    args = read_flags()
    fleet.init()
    torch.manual_seed(0)

    sizes = {"layers": args.layers, "hidden": args.hidden, "heads": args.hidden // 64}
    model = X.applications.Bert_base(vocab_size=args.vocab_size, max_position=args.max_seq_len, **sizes)
    # Sentence pairs and masks are drawn again in each epoch. A `datasets.DatasetDict` may stand in the folder's place.
    loader = model.get_train_dataloader(args.data, args.batch_size, vocab_size=args.vocab_size)
    val_loader = model.get_val_dataloader(args.data, args.batch_size, vocab_path=model.vocabulary_file)

    lr = sqrt_scaled_lr(args.lr, batch=args.batch_size * args.merge * fleet.worker_num(), reference_batch=512)
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)  # the decay is LAMB's or Muon's own
    sample = next(iter(loader)) if args.budget else None  # a budget is planned on a batch
    model, optimizer = fleet.distribute(model, optimizer, build_strategy(args), sample=sample)
    updates = math.ceil(args.epochs * len(loader) / args.merge)
    scheduler = Polynomial(optimizer, total_steps=updates, warmup_steps=updates // 10, power=1.0)

    everything = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    checkpoints = args.run / "checkpoints"
    found = fleet.load_checkpoint(checkpoints, **everything)  # None on a first start
    step = found.step if found else 0
    if found and fleet.is_first_worker():
        print(f"continuing after {step} of {args.epochs * len(loader)} micro-batches", flush=True)

    with fleet.Monitor(args.run, total_steps=updates) as monitor:
        for epoch in range(loader.sampler.epoch, args.epochs):
            model.train()
            for batch in loader:
                report = optimizer.minimize(model.loss(batch))
                monitor.log(report, samples=len(batch["input_ids"]))
                if report.due:
                    scheduler.step()
                step += 1
                stop = fleet.should_stop()  # SIGTERM or SIGUSR1, as Slurm sends them: the same answer on every worker
                if stop or step % args.save_every == 0:
                    fleet.save_checkpoint(checkpoints, step=step, async_save=not stop, **everything)
                if stop:
                    return
            if epoch + 1 == args.epochs:
                monitor.log(optimizer.flush())  # the last micro-batches, where they are fewer than --merge
            scores = X.applications.evaluate(model, val_loader)
            monitor.log(epoch=epoch + 1, val_loss=scores["loss"], mlm_acc=scores["mlm_acc"], nsp_acc=scores["nsp_acc"])
            fleet.save_checkpoint(checkpoints, step=step, **everything)
            if fleet.is_first_worker():
                print(f"epoch {epoch + 1}: of the masked words {scores['mlm_acc']:.2%} were predicted right", flush=True)

    save_for_transformers(args.run / "model", model, optimizer)


if __name__ == "__main__":
    main()
