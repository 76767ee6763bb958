//! Tests of `digits` as jobs of real processes, with torchrun's variables and no launcher.

#![allow(clippy::unwrap_used)] // in a test a broken expectation ends it

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;

use convoke_store::StoreServer;
use tempfile::TempDir;

use convoke_testkit::process::{self, Process};

/// The outputs of a finished job, indexed by rank, and its folder of error files.
struct Job {
    outputs: Vec<Output>,
    folder: TempDir,
}

/// Runs `digits ARGUMENTS` on `world` ranks. `attempt` is the value of TORCHELASTIC_RESTART_COUNT.
fn run(world: usize, attempt: u32, arguments: &[&str]) -> Job {
    let folder = tempfile::tempdir().unwrap();
    // As with a real agent, the store outlives all ranks.
    let store = StoreServer::bind(&["127.0.0.1:0".parse().unwrap()]).unwrap();
    let workers: Vec<Process> = (0..world)
        .map(|rank| {
            let mut command = process::program(env!("CARGO_BIN_EXE_digits"));
            process::set_rank_variables(&mut command, rank, world, store.port());
            command
                .args(arguments)
                .env("LOCAL_RANK", rank.to_string())
                .env("LOCAL_WORLD_SIZE", world.to_string())
                .env("TORCHELASTIC_RESTART_COUNT", attempt.to_string())
                .env("TORCHELASTIC_ERROR_FILE", error_file(&folder, rank));
            Process::start(&mut command)
        })
        .collect();
    // Each worker has a reader thread, so that a full pipe of one worker does not block the others.
    let waiting: Vec<_> = workers.into_iter().map(|worker| thread::spawn(|| worker.wait())).collect();
    Job { outputs: waiting.into_iter().map(|thread| thread.join().unwrap()).collect(), folder }
}

fn error_file(folder: &TempDir, rank: usize) -> PathBuf {
    folder.path().join(format!("error-{rank}.json"))
}

impl Job {
    fn stdout(&self, rank: usize) -> String {
        String::from_utf8(self.outputs[rank].stdout.clone()).unwrap()
    }

    fn stderr(&self, rank: usize) -> String {
        String::from_utf8(self.outputs[rank].stderr.clone()).unwrap()
    }

    /// Returns the accuracy in percent and the parameter hash of a job that must succeed.
    fn result(&self) -> (f64, String) {
        for (rank, output) in self.outputs.iter().enumerate() {
            assert!(output.status.success(), "rank {rank}: {} {}", output.status, self.stderr(rank));
            assert!(rank == 0 || output.stdout.is_empty(), "only rank 0 prints: {}", self.stdout(rank));
        }
        let text = self.stdout(0);
        let last = text.lines().last().unwrap();
        let words: Vec<&str> = last.split_whitespace().collect();
        assert_eq!(&words[..3], ["digits:", "done:", "accuracy"], "{text}");
        (words[3].parse().unwrap(), words[7].to_owned())
    }
}

#[test]
fn one_two_and_four_workers_train_equally_well() {
    let accuracies: Vec<f64> = [1, 2, 4].map(|world| run(world, 0, &[]).result().0).to_vec();
    let (least, most) = accuracies.iter().fold((100.0f64, 0.0f64), |(l, m), &a| (l.min(a), m.max(a)));
    assert!(least >= 95.0 && most - least <= 0.5, "{accuracies:?} % with 1, 2 and 4 workers");
}

#[test]
fn uneven_batches_train_too() {
    let job = run(3, 0, &["--epochs=2", "--batch=64"]);
    assert!(job.result().0 > 80.0, "{}", job.stdout(0));
    // With a batch of 2, one of three ranks has no examples in each step.
    run(3, 0, &["--epochs=1", "--batch=2"]).result();
}

#[test]
fn buckets_and_manual_averaging_produce_equal_parameters() {
    let folder = tempfile::tempdir().unwrap();
    // The network has several hidden layers, and each bucket holds a few parameters.
    let train = |world: usize, gradients: &str| {
        let path = folder.path().join(format!("{world}-{gradients}"));
        let (checkpoint, gradients) =
            (format!("--checkpoint={}", path.display()), format!("--gradients={gradients}"));
        let arguments = ["--epochs=3", "--hidden=48,32,16", "--bucket-bytes=5000", &checkpoint, &gradients];
        let (_, hash) = run(world, 0, &arguments).result();
        (hash, floats(&path))
    };
    // With two ranks there is only one order of addition, so results are bitwise equal.
    let (by_hand, _) = train(2, "by-hand");
    assert_eq!(train(2, "ddp").0, by_hand);
    assert_eq!(train(2, "late").0, by_hand);
    let (by_hand, ddp) = (train(4, "by-hand").1, train(4, "ddp").1);
    let far = by_hand.iter().zip(&ddp).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(by_hand.len() == ddp.len() && by_hand.len() > 10_000 && far < 1e-3, "{far}");
}

/// Returns the parameters and momentum in a checkpoint of a network with three hidden layers.
fn floats(path: &Path) -> Vec<f32> {
    let bytes = fs::read(path).unwrap();
    let values = &bytes[28 + 3 * 4..bytes.len() - 8];
    values.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect()
}

#[test]
fn trace_shows_bucket_transfers_during_the_backward_pass() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let trace = format!("--trace={}", path.display());
    run(2, 0, &["--epochs=1", "--hidden=256,256", "--bucket-bytes=1000", &trace]).result();
    let text = fs::read_to_string(&path).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&text).unwrap();
    let spans = |name: &str, rank: usize| -> Vec<(f64, f64)> {
        let events = trace["traceEvents"].as_array().unwrap().iter();
        let named =
            events.filter(|event| event["name"] == name && event["pid"] == rank && event["ph"] == "X");
        named.map(|event| (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap())).collect()
    };
    for rank in 0..2 {
        let (backward, buckets) = (spans("backward", rank), spans("bucket 0", rank));
        assert!(!backward.is_empty() && backward.len() == buckets.len(), "{}", &text[..2000]);
        // In most steps the first bucket is sent before half of the pass is done.
        let early = |(pass, bucket): &(&(f64, f64), &(f64, f64))| bucket.0 < pass.0 + pass.1 / 2.0;
        let count = backward.iter().zip(&buckets).filter(early).count();
        assert!(count > backward.len() / 2, "{count} of {}", backward.len());
    }
    assert!(text.contains("layer2.weights"), "{}", &text[..2000]);
    let nowhere = run(1, 0, &["--epochs=1", "--trace=/nonexistent/trace"]);
    assert!(nowhere.stderr(0).contains("cannot write the trace /nonexistent/trace"), "{}", nowhere.stderr(0));
}

#[test]
fn resumed_job_matches_an_uninterrupted_one() {
    let (_, undisturbed) = run(2, 0, &["--epochs=5"]).result();

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let checkpoint = format!("--checkpoint={}", path.display());
    let arguments = ["--epochs=5", "--die-at=4:1", &checkpoint];
    let broken = run(2, 0, &arguments);
    assert!(broken.outputs.iter().all(|output| !output.status.success()));
    assert!(broken.stderr(0).contains("rank 1"), "the survivor names the dead: {}", broken.stderr(0));
    assert!(broken.stdout(0).contains("epoch   3") && !broken.stdout(0).contains("epoch   4"));
    let told = fs::read_to_string(error_file(&broken.folder, 0)).unwrap();
    assert!(told.contains("rank 1"), "{told}");

    let resumed = run(2, 1, &arguments);
    let (_, hash) = resumed.result();
    assert!(resumed.stdout(0).contains("going on after epoch 3"), "{}", resumed.stdout(0));
    assert_eq!(hash, undisturbed);

    let (_, again) = run(2, 0, &["--epochs=5", &checkpoint]).result();
    assert_eq!(again, undisturbed, "nothing is left to do, and nothing is changed");
}

#[test]
fn unusable_checkpoint_ends_all_ranks_and_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let checkpoint = format!("--checkpoint={}", path.display());
    run(1, 0, &["--epochs=1", &checkpoint]).result();

    let seeds = run(2, 0, &["--epochs=2", "--seed=2", &checkpoint]);
    assert!(seeds.stderr(0).contains("--seed 1"), "{}", seeds.stderr(0));

    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let damaged = run(2, 0, &["--epochs=2", &checkpoint]);
    assert_eq!(damaged.outputs[0].status.code(), Some(1));
    assert!(
        damaged.stderr(0).contains(&format!("checkpoint {}: damaged", path.display())),
        "{}",
        damaged.stderr(0)
    );
    assert!(fs::read_to_string(error_file(&damaged.folder, 0)).unwrap().contains("damaged"));
    assert_eq!(damaged.outputs[1].status.code(), Some(1));
    assert!(damaged.stderr(1).contains("rank 0"), "{}", damaged.stderr(1));
    assert_eq!(fs::read(&path).unwrap(), bytes, "what could not be read is left as it is");
}

#[test]
fn wrong_command_line_is_refused_before_anything_starts() {
    let cases: [(&[&str], i32, &str); 3] = [
        (&["--batch=0"], 2, "at least 1"),
        (&["--frobnicate"], 2, "--frobnicate"),
        (&["--die-at=1:7"], 1, "rank 7"),
    ];
    for (arguments, code, message) in cases {
        let job = run(1, 0, arguments);
        assert_eq!(job.outputs[0].status.code(), Some(code), "{arguments:?}");
        assert!(job.stderr(0).contains(message), "{arguments:?}: {}", job.stderr(0));
    }
    let help = run(1, 0, &["--help"]);
    assert!(help.outputs[0].status.success() && help.stdout(0).contains("--checkpoint"));
}

#[test]
fn digits_without_a_launcher_is_a_world_of_one() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_digits"));
    command.arg("--epochs=1").stdin(Stdio::null()).current_dir(Path::new("/"));
    for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
        command.env_remove(name);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("1 worker,"), "{text}");
}
