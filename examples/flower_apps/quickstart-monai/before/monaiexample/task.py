"""A small DenseNet from MONAI, synthetic data in the shape of MedNIST, and the training and test loops."""

import torch
from monai.data import DataLoader, Dataset
from monai.networks.nets import DenseNet
from monai.transforms import Compose, RandFlipd, ScaleIntensityd

CLASSES = 6


def load_model():
    """Make a DenseNet121 with fewer blocks, so that it trains in seconds."""
    return DenseNet(spatial_dims=2, in_channels=1, out_channels=CLASSES, init_features=8, growth_rate=4, block_config=(2, 2))


def made(samples, seed, brightness):
    """Make noisy grey pictures as dicts, with one pattern for each class."""
    patterns = torch.randn(CLASSES, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    images = patterns[labels] + torch.randn(samples, 1, 64, 64, generator=generator) + brightness
    return [{"img": image, "label": label} for image, label in zip(images, labels, strict=True)]


def load_data(num_partitions, partition_id, batch_size=16):
    scale = ScaleIntensityd("img", minv=-1 - partition_id, maxv=1 + partition_id)  # each site's pictures have their own scale
    flip = RandFlipd("img", spatial_axis=0, prob=0.5).set_random_state(partition_id)
    train = Dataset(made(48, 1 + partition_id, 0.5 * partition_id), Compose([scale, flip]))
    val = Dataset(made(24, 1001 + partition_id, 0.5 * partition_id), scale)
    trainloader = DataLoader(train, batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(partition_id))
    return trainloader, DataLoader(val, batch_size=batch_size)


def train_func(model, train_loader, epoch_num, device):
    model.to(device)
    loss_function = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    model.train()
    running_loss = 0.0
    for _ in range(epoch_num):
        for batch in train_loader:
            images, labels = batch["img"].to(device), batch["label"].to(device)
            optimizer.zero_grad()
            loss = loss_function(model(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epoch_num * len(train_loader))


def test_func(model, test_loader, device):
    model.to(device)
    model.eval()
    loss_function = torch.nn.CrossEntropyLoss()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for batch in test_loader:
            images, labels = batch["img"].to(device), batch["label"].to(device)
            out = model(images)
            loss += loss_function(out, labels).item()
            correct += (out.argmax(dim=1) == labels).sum().item()
    return loss / len(test_loader), correct / len(test_loader.dataset)
