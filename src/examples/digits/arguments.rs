//! The command line of `digits`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;

use lexopt::prelude::*;

pub(crate) const HELP: &str = "\
Trains a small network on images of handwritten digits, on as many workers as it is started with.

Usage: convoke --nproc-per-node=4 digits [options]     (or `digits [options]` alone: one worker)

Options:
  --epochs N             passes over the training images [30]
  --batch N              images in a step, of all workers together [64]
  --lr RATE              learning rate [0.1]
  --hidden N,N,...       units of each hidden layer [64]
  --seed N               decides held-out images, initial weights and order [1]
  --checkpoint PATH      write the state here after each epoch; continue from it if it exists
  --gradients HOW        how gradients are averaged: `ddp`, in buckets while the next ones are computed; `late`, in
                         buckets after that; `by-hand`, all with one all_reduce [ddp]
  --bucket-bytes N       size of a bucket [1048576]
  --device WHERE         where training runs: `cpu`; `cuda`, on this worker's GPU, gradients by NCCL; `staged`, there
                         as well, gradients through the host [cpu]
  --trace FILE           write what all ranks did when, for https://ui.perfetto.dev
  --print-every N        print each Nth epoch only, and the last one [1]
  --die-at EPOCH:RANK    on the first attempt, this rank kills itself in the middle of this epoch
  -h, --help             print this text
";

const AT_LEAST_1: &str = "a whole number of at least 1";

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Arguments {
    pub(crate) epochs: u32,
    pub(crate) batch: usize,
    pub(crate) learning_rate: f32,
    pub(crate) hidden: Vec<usize>,
    pub(crate) gradients: Gradients,
    pub(crate) bucket_bytes: usize,
    pub(crate) device: ComputeDevice,
    pub(crate) trace: Option<PathBuf>,
    pub(crate) seed: u64,
    pub(crate) checkpoint: Option<PathBuf>,
    pub(crate) print_every: u32,
    pub(crate) die_at: Option<DieAt>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gradients {
    /// `convoke_train::Ddp` averages gradients: during the backward pass if `overlap`, else after it.
    Ddp { overlap: bool },
    /// One call of `all_reduce` averages all gradients after the backward pass.
    ByHand,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ComputeDevice {
    Cpu,
    /// A GPU; gradients are averaged by NCCL.
    Cuda,
    /// A GPU; gradients are averaged through host memory.
    Staged,
}

/// A failure that the user requests, for demonstration and tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DieAt {
    /// Number of the epoch in which the rank fails, from 1 as in the output.
    pub(crate) epoch: u32,
    pub(crate) rank: usize,
}

impl Arguments {
    /// Parses the words of the command line. `None` if the user requested help.
    pub(crate) fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Option<Self>, lexopt::Error> {
        let mut arguments = Self {
            epochs: 30,
            batch: 64,
            learning_rate: 0.1,
            hidden: vec![64],
            gradients: Gradients::Ddp { overlap: true },
            bucket_bytes: 1 << 20,
            device: ComputeDevice::Cpu,
            trace: None,
            seed: 1,
            checkpoint: None,
            print_every: 1,
            die_at: None,
        };
        let mut parser = lexopt::Parser::from_args(words);
        while let Some(argument) = parser.next()? {
            match argument {
                Long("epochs") => arguments.epochs = parser.value()?.parse()?,
                Long("batch") => arguments.batch = value(&mut parser, AT_LEAST_1, positive)?,
                Long("lr") => {
                    let finite = |text: &str| positive(text).filter(|rate: &f32| rate.is_finite());
                    arguments.learning_rate = value(&mut parser, "a positive number", finite)?;
                }
                Long("hidden") => {
                    arguments.hidden = value(&mut parser, "numbers of units, as in 64,64", units)?
                }
                Long("gradients") => {
                    arguments.gradients = value(&mut parser, "ddp, late or by-hand", gradients)?
                }
                Long("bucket-bytes") => arguments.bucket_bytes = parser.value()?.parse()?,
                Long("device") => arguments.device = value(&mut parser, "cpu, cuda or staged", device)?,
                Long("trace") => arguments.trace = Some(parser.value()?.into()),
                Long("seed") => arguments.seed = parser.value()?.parse()?,
                Long("print-every") => arguments.print_every = value(&mut parser, AT_LEAST_1, positive)?,
                Long("checkpoint") => arguments.checkpoint = Some(parser.value()?.into()),
                Long("die-at") => {
                    arguments.die_at = Some(value(&mut parser, "EPOCH:RANK, as in 3:1", die_at)?)
                }
                Long("help") | Short('h') => return Ok(None),
                Long(_) | Short(_) | Value(_) => return Err(argument.unexpected()),
            }
        }
        if arguments.device != ComputeDevice::Cpu && arguments.gradients == Gradients::ByHand {
            let what = "--gradients=by-hand goes with --device=cpu only";
            return Err(lexopt::Error::Custom(what.into()));
        }
        Ok(Some(arguments))
    }

    /// Returns whether gradients are sent while the next ones are computed.
    pub(crate) fn overlaps(&self) -> bool {
        self.gradients == Gradients::Ddp { overlap: true }
    }
}

fn positive<T: FromStr + PartialOrd + Default>(text: &str) -> Option<T> {
    text.parse().ok().filter(|number| *number > T::default())
}

fn die_at(text: &str) -> Option<DieAt> {
    let (epoch, rank) = text.split_once(':')?;
    let at = DieAt { epoch: epoch.parse().ok()?, rank: rank.parse().ok()? };
    (at.epoch > 0).then_some(at)
}

/// Parses the sizes of the hidden layers, or returns `None`. Limits of 16 layers and 65,536 units catch
/// mistakes.
fn units(text: &str) -> Option<Vec<usize>> {
    let units = text.split(',').map(|count| count.parse().ok().filter(|count| (1..=1 << 16).contains(count)));
    units.collect::<Option<Vec<usize>>>().filter(|units| units.len() <= 16)
}

fn gradients(text: &str) -> Option<Gradients> {
    match text {
        "ddp" => Some(Gradients::Ddp { overlap: true }),
        "late" => Some(Gradients::Ddp { overlap: false }),
        "by-hand" => Some(Gradients::ByHand),
        _ => None,
    }
}

fn device(text: &str) -> Option<ComputeDevice> {
    match text {
        "cpu" => Some(ComputeDevice::Cpu),
        "cuda" => Some(ComputeDevice::Cuda),
        "staged" => Some(ComputeDevice::Staged),
        _ => None,
    }
}

/// Parses the value of a flag, or returns an error that names the expected form.
fn value<T>(
    parser: &mut lexopt::Parser,
    expected: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<T, lexopt::Error> {
    let value = parser.value()?;
    let wrong = || lexopt::Error::Custom(format!("{} is not {expected}", value.display()).into());
    value.to_str().and_then(parse).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Option<Arguments>, String> {
        Arguments::parse(words.iter().map(OsString::from)).map_err(|error| error.to_string())
    }

    #[test]
    fn flags_accept_equals_sign_and_separate_values() {
        let words = [
            ["--epochs", "3"],
            ["--batch=32", "--lr=0.5"],
            ["--seed", "9"],
            ["--checkpoint=x", "--hidden=128,32"],
            ["--die-at", "2:1"],
            ["--gradients=late", "--bucket-bytes=5"],
            ["--trace", "t.json"],
            ["--device", "staged"],
        ]
        .concat();
        let expected = Arguments {
            epochs: 3,
            batch: 32,
            learning_rate: 0.5,
            hidden: vec![128, 32],
            gradients: Gradients::Ddp { overlap: false },
            bucket_bytes: 5,
            device: ComputeDevice::Staged,
            trace: Some("t.json".into()),
            seed: 9,
            checkpoint: Some("x".into()),
            print_every: 1,
            die_at: Some(DieAt { epoch: 2, rank: 1 }),
        };
        assert_eq!(parse(&words), Ok(Some(expected)));
        assert_eq!(parse(&["--epochs=3", "--help"]), Ok(None));
    }

    #[test]
    fn bad_values_are_named() {
        let cases = [
            ("--batch=0", "0 is not a whole number of at least 1"),
            ("--lr=-1", "-1 is not a positive number"),
            ("--lr=nan", "nan is not a positive number"),
            ("--lr=inf", "inf is not a positive number"),
            ("--die-at=3", "3 is not EPOCH:RANK"),
            ("--die-at=0:1", "0:1 is not EPOCH:RANK"),
            ("--die-at=a:b", "a:b is not EPOCH:RANK"),
            ("--epochs=-1", "-1"),
            ("--hidden=", " is not numbers of units, as in 64,64"),
            ("--hidden=64,0", "64,0 is not numbers of units"),
            ("--device=gpu", "gpu is not cpu, cuda or staged"),
            ("--gradients=slow", "slow is not ddp, late or by-hand"),
            ("--seed=x", "x"),
            ("--checkpoint", "missing argument"),
            ("--speed=1", "--speed"),
            ("data.csv", "data.csv"),
        ];
        let both = parse(&["--device=cuda", "--gradients=by-hand"]).unwrap_err();
        assert_eq!(both, "--gradients=by-hand goes with --device=cpu only");
        for (word, message) in cases {
            let error = parse(&[word]).unwrap_err();
            assert!(error.contains(message), "{word}: {error}");
        }
    }
}
