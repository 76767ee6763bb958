//! The checkpoint from which a restarted run continues. Rank 0 writes it atomically after each epoch.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::hash::fnv1a;
use crate::network::Network;

const MAGIC: [u8; 8] = *b"digits\r\n";
/// Version of the checkpoint format. A file of another version is an error.
const VERSION: u32 = 3;
/// Length of the header: magic, version, epoch, step, loss, seed and number of hidden layers. After the header come the
/// numbers of units, the parameters and the momentum.
const HEADER_BYTES: usize = 8 + 4 + 4 + 4 + 8 + 8 + 4;
const HASH_BYTES: usize = 8;

/// The state of training after a number of epochs, and of steps of the next one.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Checkpoint {
    /// Number of completed epochs.
    pub(crate) epoch: u32,
    /// Number of completed steps of the next epoch, and the sum of their losses over examples.
    pub(crate) step: u32,
    pub(crate) total_loss: f64,
    /// Seed of the run. It decides which images are held out, so another seed must not use the file.
    pub(crate) seed: u64,
    pub(crate) network: Network,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckpointError {
    #[error("checkpoint {}: cannot {action} it: {source}", path.display())]
    Io { path: PathBuf, action: &'static str, source: io::Error },
    #[error("checkpoint {}: damaged: {what}; delete it to start anew", path.display())]
    Damaged { path: PathBuf, what: String },
    #[error(
        "checkpoint {} is of version {version}, this program reads version {VERSION}: \
         delete it to start anew, or use the program that wrote it",
        path.display()
    )]
    Version { path: PathBuf, version: u32 },
    #[error(
        "checkpoint {} was written with --seed {written}, this run has --seed {asked}, which holds out other \
         images: use the same seed or another file",
        path.display()
    )]
    Seed { path: PathBuf, written: u64, asked: u64 },
    #[error(
        "checkpoint {} is of a network with hidden layers of {written:?} units, this run has {asked:?}: use the same \
         --hidden or another file",
        path.display()
    )]
    Network { path: PathBuf, written: Vec<usize>, asked: Vec<usize> },
}

impl Checkpoint {
    /// Replaces `path` atomically: after a crash at any time it holds the old state or the new one.
    pub(crate) fn write(&self, path: &Path) -> Result<(), CheckpointError> {
        let failed = |source| CheckpointError::Io { path: path.to_owned(), action: "write", source };
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(".partial");
        let mut file = File::create(&temporary).map_err(failed)?;
        file.write_all(&self.to_bytes()).map_err(failed)?;
        // The data is synced before the rename, and the rename before the next epoch. Otherwise a power
        // failure may leave the new name with an empty file.
        file.sync_all().map_err(failed)?;
        fs::rename(&temporary, path).map_err(failed)?;
        let folder = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)
    }

    /// Reads the checkpoint in `path`; `None` if there is no such file. Another seed or other hidden layers
    /// in the file are an error.
    pub(crate) fn read(path: &Path, seed: u64, hidden: &[usize]) -> Result<Option<Self>, CheckpointError> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(CheckpointError::Io { path: path.to_owned(), action: "read", source }),
        };
        let checkpoint = Self::from_bytes(&bytes, path)?;
        if checkpoint.seed != seed {
            let (path, written) = (path.to_owned(), checkpoint.seed);
            return Err(CheckpointError::Seed { path, written, asked: seed });
        }
        if checkpoint.network.hidden() != hidden {
            let written = checkpoint.network.hidden().to_vec();
            return Err(CheckpointError::Network { path: path.to_owned(), written, asked: hidden.to_vec() });
        }
        Ok(Some(checkpoint))
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + 8 * self.network.len() + HASH_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.epoch.to_le_bytes());
        bytes.extend(self.step.to_le_bytes());
        bytes.extend(self.total_loss.to_le_bytes());
        bytes.extend(self.seed.to_le_bytes());
        bytes.extend((self.network.hidden().len() as u32).to_le_bytes());
        for &units in self.network.hidden() {
            bytes.extend((units as u32).to_le_bytes());
        }
        for value in self.network.parameters.iter().chain(&self.network.velocity).flatten() {
            bytes.extend(value.to_le_bytes());
        }
        bytes.extend(fnv1a(bytes.iter().copied()).to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8], path: &Path) -> Result<Self, CheckpointError> {
        let damaged = |what: String| CheckpointError::Damaged { path: path.to_owned(), what };
        let mut rest = bytes;
        if read_array(&mut rest) != Some(MAGIC) {
            return Err(damaged("this is no checkpoint of digits".to_owned()));
        }
        let short = || damaged(format!("{} bytes are too few", bytes.len()));
        let version = u32::from_le_bytes(read_array(&mut rest).ok_or_else(short)?);
        if version != VERSION {
            return Err(CheckpointError::Version { path: path.to_owned(), version });
        }
        let (body, hash) = bytes.split_last_chunk::<HASH_BYTES>().ok_or_else(short)?;
        if fnv1a(body.iter().copied()) != u64::from_le_bytes(*hash) {
            return Err(damaged(format!("the hash does not fit its {} bytes", bytes.len())));
        }
        let epoch = u32::from_le_bytes(read_array(&mut rest).ok_or_else(short)?);
        let step = u32::from_le_bytes(read_array(&mut rest).ok_or_else(short)?);
        let total_loss = f64::from_le_bytes(read_array(&mut rest).ok_or_else(short)?);
        let seed = u64::from_le_bytes(read_array(&mut rest).ok_or_else(short)?);
        let layers = u32::from_le_bytes(read_array(&mut rest).ok_or_else(short)?);
        let mut hidden = Vec::new();
        for _ in 0..layers {
            hidden.push(u32::from_le_bytes(read_array(&mut rest).ok_or_else(short)?) as usize);
        }
        // The hash matches, so this program wrote the sizes, and the allocation is bounded.
        let mut network = Network::empty(&hidden);
        if rest.len() != 8 * network.len() + HASH_BYTES {
            let what = format!("{} bytes are not what a network of {hidden:?} hidden units has", bytes.len());
            return Err(damaged(what));
        }
        for value in network.parameters.iter_mut().chain(&mut network.velocity).flatten() {
            *value = f32::from_le_bytes(read_array(&mut rest).ok_or_else(short)?);
        }
        Ok(Self { epoch, step, total_loss, seed, network })
    }
}

fn read_array<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    rest.split_off(..N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Checkpoint {
        let mut network = Network::initial(&[7, 9], 5);
        network.velocity.iter_mut().for_each(|velocity| velocity.fill(0.25));
        Checkpoint { epoch: 7, step: 3, total_loss: 0.5, seed: 5, network }
    }

    #[test]
    fn checkpoint_round_trips() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        assert_eq!(Checkpoint::read(&path, 5, &[7, 9]).unwrap(), None);
        for epoch in [7, 8] {
            let checkpoint = Checkpoint { epoch, ..sample() };
            checkpoint.write(&path).unwrap();
            assert_eq!(Checkpoint::read(&path, 5, &[7, 9]).unwrap(), Some(checkpoint));
        }
        let names: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["state"], "nothing but the checkpoint is left");
    }

    #[test]
    fn every_damaged_byte_and_every_truncation_is_detected() {
        let bytes = sample().to_bytes();
        let path = Path::new("state");
        for index in (0..HEADER_BYTES).chain((HEADER_BYTES..bytes.len()).step_by(97)).chain([bytes.len() - 1])
        {
            let mut damaged = bytes.clone();
            damaged[index] ^= 0x10;
            let error = Checkpoint::from_bytes(&damaged, path).unwrap_err().to_string();
            assert!(
                error.starts_with("checkpoint state") && error.contains("delete it"),
                "byte {index}: {error}"
            );
        }
        for length in (0..HEADER_BYTES + 8).chain([bytes.len() - 4, bytes.len() - 1]) {
            assert!(Checkpoint::from_bytes(&bytes[..length], path).is_err(), "{length} bytes");
        }
        let mut longer = bytes.clone();
        longer.extend([0; 4]);
        assert!(Checkpoint::from_bytes(&longer, path).is_err());
        assert!(Checkpoint::from_bytes(&bytes, path).is_ok());
    }

    #[test]
    fn checkpoint_error_for_later_version_or_other_seed_states_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        sample().write(&path).unwrap();
        let error = Checkpoint::read(&path, 6, &[7, 9]).unwrap_err().to_string();
        assert!(error.contains("--seed 5") && error.contains("--seed 6"), "{error}");
        let error = Checkpoint::read(&path, 5, &[7]).unwrap_err().to_string();
        assert!(error.contains("[7, 9] units, this run has [7]"), "{error}");
        let mut bytes = sample().to_bytes();
        bytes[8] = 9;
        fs::write(&path, bytes).unwrap();
        let error = Checkpoint::read(&path, 5, &[7, 9]).unwrap_err().to_string();
        assert!(error.contains("version 9") && error.contains("version 3"), "{error}");
    }

    #[test]
    fn unusable_checkpoint_path_is_named() {
        let path = Path::new("/nonexistent/state");
        assert!(sample().write(path).unwrap_err().to_string().contains("/nonexistent/state"));
        assert!(Checkpoint::read(Path::new("/"), 5, &[]).unwrap_err().to_string().contains("cannot read"));
    }
}
