"""Train ResNet-50 on a folder of images at a large batch: LARS, warm-up and cosine, evaluation, exact resume, a monitor.

The folder is laid out as for torchvision's ImageFolder: imagenet/train/CLASS/*.jpg and imagenet/val/CLASS/*.jpg.

fleetrun examples/imagenet.py imagenet                               # on all GPUs of this machine
fleetrun examples/imagenet.py imagenet --batch_size 64 --merge 4     # the same global batch on cards with less memory
fleetrun --ips 10.0.0.1,10.0.0.2 examples/imagenet.py imagenet       # the same line on each of two machines

Run the same line again to continue after a stop; `fleetx report runs/imagenet` draws the curves.
"""

import argparse
import math

import torch

import fleetx as X
from fleetx import fleet
from fleetx.optim.schedules import Cosine, sqrt_scaled_lr


def read_flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder with train/CLASS/IMAGE and val/CLASS/IMAGE")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--warmup_epochs", type=float, default=5)
    parser.add_argument("--batch_size", type=int, default=256, help="images of a micro-batch on one worker")
    parser.add_argument("--merge", type=int, default=1, help="micro-batches that make one update")
    parser.add_argument("--lr", type=float, default=2.5, help="rate at 256 images an update; it grows with the root of the batch")
    parser.add_argument("--weight_decay", type=float, default=5e-5)
    parser.add_argument("--workers", type=int, help="reading processes of each worker; by default its part of the cores")
    parser.add_argument("--run", default="runs/imagenet", help="folder of curves, checkpoints and the trained model")
    parser.add_argument("--save_every", type=int, default=1000, help="micro-batches between two checkpoints")
    return parser.parse_args()


def build_strategy(args):
    strategy = fleet.DistributedStrategy(lars=True)
    strategy.lars_configs = {"lars_weight_decay": args.weight_decay}
    strategy.amp = fleet.device().type == "cuda"  # bfloat16; most CPUs are slower with it
    if args.merge > 1:
        strategy.gradient_merge = True
        strategy.gradient_merge_configs = {"k_steps": args.merge}
    return strategy


def main():
    args = read_flags()
    fleet.init()
    torch.manual_seed(0)

    on_gpu = fleet.device().type == "cuda"
    model = X.applications.Resnet50(args.classes, image_size=args.image_size, channels_last=on_gpu, label_smoothing=0.1)
    # Random crops and flips in training, the centre in evaluation. A `datasets.DatasetDict` may stand in the folder's place.
    loader = model.get_train_dataloader(args.data, args.batch_size, workers=args.workers, on_bad_sample="skip")
    val_loader = model.get_val_dataloader(args.data, args.batch_size, workers=args.workers)

    lr = sqrt_scaled_lr(args.lr, batch=args.batch_size * args.merge * fleet.worker_num(), reference_batch=256)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    model, optimizer = fleet.distribute(model, optimizer, build_strategy(args))
    updates = math.ceil(args.epochs * len(loader) / args.merge)
    warmup = min(round(args.warmup_epochs * len(loader) / args.merge), updates - 1)
    scheduler = Cosine(optimizer, total_steps=updates, warmup_steps=warmup)

    everything = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    checkpoints = f"{args.run}/checkpoints"
    found = fleet.load_checkpoint(checkpoints, **everything)  # None on a first start
    step, best = (found.step, found.values["best"]) if found else (0, 0.0)
    if found and fleet.is_first_worker():
        print(f"continuing after {step} of {args.epochs * len(loader)} micro-batches", flush=True)

    with fleet.Monitor(args.run, total_steps=updates) as monitor:
        for epoch in range(loader.sampler.epoch, args.epochs):
            model.train()
            for images, labels in loader:
                report = optimizer.minimize(model.loss((images, labels)))
                monitor.log(report, samples=len(labels))
                if report.due:
                    scheduler.step()
                step += 1
                stop = fleet.should_stop()  # SIGTERM or SIGUSR1, as Slurm sends them: the same answer on every worker
                if stop or step % args.save_every == 0:
                    fleet.save_checkpoint(checkpoints, step=step, async_save=not stop, best=best, **everything)
                if stop:
                    return
            if epoch + 1 == args.epochs:
                monitor.log(optimizer.flush())  # the last micro-batches, where they are fewer than --merge
            scores = X.applications.evaluate(model, val_loader)  # the images of all workers, each counted once
            best = max(best, scores["acc1"])
            monitor.log(epoch=epoch + 1, val_loss=scores["loss"], acc1=scores["acc1"], acc5=scores["acc5"])
            fleet.save_checkpoint(checkpoints, step=step, best=best, **everything)
            if fleet.is_first_worker():
                print(f"epoch {epoch + 1}: top-1 {scores['acc1']:.2%}, top-5 {scores['acc5']:.2%}, best {best:.2%}", flush=True)

    fleet.save_model(f"{args.run}/model.safetensors", model, optimizer)  # torchvision's resnet50 has the same keys


if __name__ == "__main__":
    main()
