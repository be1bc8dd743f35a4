"""Fine-tune a BERT to sort texts into classes: one that pretrain_text.py has made, or any model of transformers.

The data is a folder texts/train/CLASS/*.txt and texts/val/CLASS/*.txt, or the name of a data set that Hugging Face's `datasets`
loads, with columns `text` and `label`.

fleetrun examples/finetune_text.py texts --model runs/pretrain/model      # needs no transformers
fleetrun examples/finetune_text.py texts --hf bert-base-uncased           # pip install "fleetx[hf]"
fleetrun examples/finetune_text.py imdb --hf bert-base-uncased --merge 4  # and pip install datasets

Run the same line again to continue after a stop.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import fleetx as X
from fleetx import fleet
from fleetx.optim.schedules import Polynomial


def read_flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of train/CLASS/*.txt and val/CLASS/*.txt, or the name of a data set")
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--model", type=Path, help="folder that pretrain_text.py has written")
    start.add_argument("--hf", help="name or folder of a model of transformers")
    parser.add_argument("--max_seq_len", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32, help="texts of a micro-batch on one worker")
    parser.add_argument("--merge", type=int, default=1, help="micro-batches that make one update")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--run", default="runs/finetune", type=Path, help="folder of curves, checkpoints and the trained model")
    parser.add_argument("--save_every", type=int, default=200, help="micro-batches between two checkpoints")
    return parser.parse_args()


def load_texts(data, *splits):
    """Return pairs (text, label) of the first split that there is, and the number of classes."""
    place = next((Path(data) / split for split in splits if (Path(data) / split).is_dir()), None)
    if place is not None:
        classes = sorted(folder.name for folder in (Path(data) / "train").iterdir() if folder.is_dir())
        files = [(file, label) for label, name in enumerate(classes) for file in sorted((place / name).glob("*.txt"))]
        return [(file.read_text(encoding="utf-8"), label) for file, label in files], len(classes)
    from datasets import load_dataset

    found = load_dataset(data)
    rows = found[next(split for split in splits if split in found)]
    return list(zip(rows["text"], rows["label"], strict=True)), len(set(found["train"]["label"]))


class Classifier(nn.Module):
    """The body of our BERT, and a layer that tells the classes apart."""

    def __init__(self, folder, classes):
        super().__init__()
        config = json.loads((folder / "config.json").read_text())
        whole = X.applications.Bert_base(
            vocab_size=config["vocab_size"], layers=config["num_hidden_layers"], hidden=config["hidden_size"],
            heads=config["num_attention_heads"], max_position=config["max_position_embeddings"],
        )  # fmt: skip
        whole.load_state_dict(load_file(folder / "model.safetensors"))
        self.bert, self.dropout, self.classes = whole.bert, nn.Dropout(0.1), nn.Linear(config["hidden_size"], classes)

    def forward(self, input_ids, attention_mask):
        hidden = self.bert(input_ids, attention_mask)
        return self.classes(self.dropout(self.bert.pooler(hidden[:, 0])))


def build_from_pretrained(folder, classes, max_seq_len):
    """Return a model of ours, a function from texts to its inputs, and a function from these to logits."""
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer(str(folder / "vocab.txt"))
    tokenizer.enable_truncation(max_seq_len)
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("[PAD]"))

    def encode(texts):
        rows = tokenizer.encode_batch(texts)
        ids, mask = torch.tensor([row.ids for row in rows]), torch.tensor([row.attention_mask for row in rows])
        return {"input_ids": ids, "attention_mask": mask}

    model = Classifier(folder, classes)
    return model, encode, lambda inputs: model(**inputs)


def build_from_hf(name, classes, max_seq_len):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=classes)

    def encode(texts):
        return dict(tokenizer(texts, truncation=True, max_length=max_seq_len, padding=True, return_tensors="pt"))

    return model, encode, lambda inputs: model(**inputs).logits


@torch.no_grad()
def evaluate(model, logits_of, loader):
    """Return the share of texts sorted right, over the texts of all workers."""
    model.eval()
    right = torch.zeros(2, dtype=torch.float64, device=fleet.device())
    for inputs, labels in loader:
        chosen = logits_of(to_device(inputs)).argmax(1)
        right += torch.tensor([(chosen == labels.to(fleet.device())).sum(), len(labels)], device=fleet.device())
    correct, count = fleet.util.all_reduce(right).tolist()
    return correct / count


def to_device(inputs):
    return {name: tensor.to(fleet.device(), non_blocking=True) for name, tensor in inputs.items()}


def main():
    args = read_flags()
    fleet.init()
    torch.manual_seed(0)

    train_set, classes = load_texts(args.data, "train")
    val_set, _ = load_texts(args.data, "val", "validation", "test")
    build = build_from_pretrained if args.model else build_from_hf
    model, encode, logits_of = build(args.model or args.hf, classes, args.max_seq_len)

    def collate(pairs):
        texts, labels = zip(*pairs, strict=True)
        return encode(list(texts)), torch.tensor(labels)

    sampler = fleet.sampler(train_set)  # this worker's share, in another order each epoch
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, collate_fn=collate)
    val_loader = DataLoader(val_set, args.batch_size, sampler=fleet.sampler(val_set, shuffle=False), collate_fn=collate)

    strategy = fleet.DistributedStrategy(clip_norm=True)
    strategy.amp = fleet.device().type == "cuda"  # bfloat16; most CPUs are slower with it
    if args.merge > 1:
        strategy.gradient_merge = True
        strategy.gradient_merge_configs = {"k_steps": args.merge}
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.01)
    model, optimizer = fleet.distribute(model, optimizer, strategy)
    updates = math.ceil(args.epochs * len(loader) / args.merge)
    scheduler = Polynomial(optimizer, total_steps=updates, warmup_steps=updates // 10, power=1.0)

    everything = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    checkpoints = args.run / "checkpoints"
    found = fleet.load_checkpoint(checkpoints, **everything)  # None on a first start
    step = found.step if found else 0
    if found and fleet.is_first_worker():
        print(f"continuing after {step} of {args.epochs * len(loader)} micro-batches", flush=True)

    with fleet.Monitor(args.run, total_steps=updates) as monitor:
        for epoch in range(sampler.epoch, args.epochs):
            model.train()
            for inputs, labels in loader:
                loss = nn.functional.cross_entropy(logits_of(to_device(inputs)), labels.to(fleet.device()))
                report = optimizer.minimize(loss)
                monitor.log(report, samples=len(labels))
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
            accuracy = evaluate(model, logits_of, val_loader)
            monitor.log(epoch=epoch + 1, acc=accuracy)
            fleet.save_checkpoint(checkpoints, step=step, **everything)
            if fleet.is_first_worker():
                print(f"epoch {epoch + 1}: {accuracy:.2%} of the texts are sorted right", flush=True)

    fleet.save_model(args.run / "model.safetensors", model, optimizer)


if __name__ == "__main__":
    main()
