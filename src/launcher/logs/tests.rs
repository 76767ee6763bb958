//! Tests with real pipes, files and threads. A line of test is a line of output.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::console::Console;
use super::lines::{LINE_MAX_BYTES, Lines};
use super::*;

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

const BOTH: Streams = Streams { stdout: true, stderr: true };
const STDOUT: Streams = Streams { stdout: true, stderr: false };

fn config(dir: LogDir) -> LogConfig {
    LogConfig {
        role: "trainer".to_owned(),
        dir,
        redirects: StreamChoice::All(Streams::default()),
        tee: StreamChoice::All(Streams::default()),
        prefix_template: "[${role_name}${local_rank}]:".to_owned(),
        local_ranks_filter: None,
        keep_stderr_tail: false,
        duplicate_stdout: Vec::new(),
        duplicate_stderr: Vec::new(),
    }
}

/// A directory for logs that is gone after the test, and a configuration that uses it.
fn logs_in_temp() -> Result<(tempfile::TempDir, LogConfig)> {
    let temp = tempfile::tempdir()?;
    let config = config(LogDir::Path(temp.path().join("logs")));
    Ok((temp, config))
}

/// The bytes that a console received.
#[derive(Debug, Clone, Default)]
struct Screen(Arc<Mutex<Vec<u8>>>);

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().map_err(|_| io::ErrorKind::Other)?.extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Screen {
    fn text(&self) -> String {
        self.0.lock().map_or_else(|_| String::new(), |bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    fn console(&self) -> Result<Console> {
        Ok(Console::new("screen", Box::new(self.clone())))
    }

    /// Waits until the text is there; returns the last text if it never comes.
    fn wait_for(&self, wanted: &str, limit: Duration) -> String {
        let end = Instant::now() + limit;
        loop {
            let text = self.text();
            if text.contains(wanted) || Instant::now() > end {
                return text;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn start(attempt: AttemptDir) -> Result<(Tee, Screen, Screen)> {
    let (stdout, stderr) = (Screen::default(), Screen::default());
    let tee = attempt.start_tee_on([stdout.console()?, stderr.console()?])?;
    Ok((tee, stdout, stderr))
}

/// A deadline that is not reached, of which a half is long for anything on a busy machine.
const LONG: Duration = Duration::from_secs(60);

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// The other side of what a worker got.
fn writer(target: StdioTarget) -> Result<File> {
    match target {
        StdioTarget::Pipe(fd) | StdioTarget::File(fd) | StdioTarget::Null(fd) => Ok(File::from(fd)),
        StdioTarget::Inherit => Err("inherited".into()),
    }
}

fn kind(target: &StdioTarget) -> &'static str {
    match target {
        StdioTarget::Inherit => "inherit",
        StdioTarget::Null(_) => "null",
        StdioTarget::File(_) => "file",
        StdioTarget::Pipe(_) => "pipe",
    }
}

fn names(dir: &Path) -> Result<Vec<String>> {
    let entries: io::Result<Vec<_>> = fs::read_dir(dir)?.collect();
    let mut names: Vec<String> =
        entries?.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

fn path_of(attempt: &AttemptDir) -> Result<PathBuf> {
    Ok(attempt.path.clone().ok_or("no directory")?)
}

#[test]
fn log_layout_is_base_run_attempt_rank() -> Result {
    let (temp, config) = logs_in_temp()?;
    let run = RunDir::create(&config, "job/7");
    let mut attempt = run.attempt(2, 3);
    let stdio = attempt.worker(1, 5)?;
    let base = names(&temp.path().join("logs"))?;
    assert_eq!(base.len(), 1);
    let random = base[0].strip_prefix("job_7_").ok_or("prefix")?;
    assert!(random.len() == 8 && random.bytes().all(|b| b.is_ascii_alphanumeric()), "{random}");
    let path = path_of(&attempt)?;
    assert!(path.ends_with("attempt_2") && path.is_absolute());
    assert_eq!(names(&path)?, ["0", "1", "2"]);
    assert_eq!(stdio.error_file, Some(path.join("1/error.json")));
    assert_eq!((kind(&stdio.stdout), kind(&stdio.stderr)), ("inherit", "inherit"));
    assert!(stdio.stdout.as_fd().is_none());
    assert!(attempt.start_tee()?.is_none(), "nothing to copy");
    Ok(())
}

#[test]
fn repeated_attempt_number_starts_with_empty_logs() -> Result {
    let (_temp, config) = logs_in_temp()?;
    let run = RunDir::create(&config, "job");
    let path = path_of(&run.attempt(0, 2))?;
    fs::write(path.join("0/error.json"), "{}")?;
    run.attempt(0, 1);
    assert_eq!(names(&path)?, ["0"]);
    assert_eq!(names(&path.join("0"))?, [""; 0]);
    Ok(())
}

#[test]
fn two_runs_share_a_base_but_no_directory() -> Result {
    let (temp, config) = logs_in_temp()?;
    RunDir::create(&config, "job");
    RunDir::create(&config, "job");
    assert_eq!(names(&temp.path().join("logs"))?.len(), 2);
    Ok(())
}

#[test]
fn run_directories_are_private() -> Result {
    let (temp, config) = logs_in_temp()?;
    RunDir::create(&config, "job");
    let run = temp.path().join("logs").join(&names(&temp.path().join("logs"))?[0]);
    assert_eq!(fs::metadata(run)?.permissions().mode() & 0o777, 0o700);
    Ok(())
}

#[test]
fn job_continues_without_a_log_directory() -> Result {
    let file = tempfile::NamedTempFile::new()?;
    for place in ["/proc/no/such/place".into(), file.path().to_owned(), file.path().join("below")] {
        let mut config = config(LogDir::Path(place));
        config.redirects = StreamChoice::All(STDOUT);
        let stdio = RunDir::create(&config, "job").attempt(0, 1).worker(0, 0)?;
        let what = (kind(&stdio.stdout), stdio.error_file);
        assert_eq!(what, ("inherit", None), "better on the console than lost");
    }
    Ok(())
}

#[test]
fn log_dir_dev_null_creates_no_files() -> Result {
    let mut config = config(LogDir::Disabled);
    config.redirects = StreamChoice::All(STDOUT);
    let run = RunDir::create(&config, "job");
    let mut attempt = run.attempt(0, 1);
    let stdio = attempt.worker(0, 0)?;
    assert_eq!((kind(&stdio.stdout), kind(&stdio.stderr), stdio.error_file), ("null", "inherit", None));
    Ok(())
}

#[test]
fn log_dir_dev_null_still_tees_lines() -> Result {
    let mut config = config(LogDir::Disabled);
    config.tee = StreamChoice::All(STDOUT);
    let mut attempt = RunDir::create(&config, "job").attempt(0, 1);
    let mut out = writer(attempt.worker(0, 0)?.stdout)?;
    let (tee, stdout, _) = start(attempt)?;
    writeln!(out, "hello")?;
    drop(out);
    tee.finish(soon());
    assert_eq!(stdout.text(), "[trainer0]:hello\n");
    Ok(())
}

#[test]
fn redirected_streams_go_to_files_only() -> Result {
    let (_temp, mut config) = logs_in_temp()?;
    let of_rank = [(0, STDOUT), (1, Streams { stdout: false, stderr: true })];
    config.redirects = StreamChoice::Some(BTreeMap::from(of_rank));
    let mut attempt = RunDir::create(&config, "job").attempt(0, 3);
    let kinds: Vec<_> = (0..3)
        .map(|rank| attempt.worker(rank, rank).map(|stdio| (kind(&stdio.stdout), kind(&stdio.stderr))))
        .collect::<std::result::Result<_, _>>()?;
    assert_eq!(kinds, [("file", "inherit"), ("inherit", "file"), ("inherit", "inherit")]);
    let path = path_of(&attempt)?;
    assert_eq!(names(&path.join("0"))?, ["stdout.log"]);
    assert_eq!(names(&path.join("1"))?, ["stderr.log"]);
    Ok(())
}

#[test]
fn ranks_outside_the_filter_are_silent() -> Result {
    let (_temp, mut config) = logs_in_temp()?;
    config.local_ranks_filter = Some(BTreeSet::from([1]));
    config.tee = StreamChoice::All(STDOUT);
    config.duplicate_stdout = vec!["out".to_owned()];
    let mut attempt = RunDir::create(&config, "job").attempt(0, 2);
    let path = path_of(&attempt)?;
    let (zero, one) = (attempt.worker(0, 0)?, attempt.worker(1, 1)?);
    assert_eq!((kind(&zero.stderr), kind(&one.stderr)), ("null", "inherit"));
    let (tee, stdout, _) = start(attempt)?;
    writeln!(writer(zero.stdout)?, "out 0")?;
    writeln!(writer(one.stdout)?, "out 1")?;
    tee.finish(soon());
    assert_eq!(stdout.text(), "[trainer1]:out 1\n");
    assert_eq!(fs::read_to_string(path.join("0/stdout.log"))?, "out 0\n");
    assert_eq!(fs::read_to_string(path.join("filtered_stdout.log"))?, "[trainer1]:out 1\n");
    Ok(())
}

#[test]
fn a_real_worker_writes_both_streams() -> Result {
    let (_temp, mut config) = logs_in_temp()?;
    config.tee = StreamChoice::All(BOTH);
    let mut attempt = RunDir::create(&config, "job").attempt(0, 1);
    let path = path_of(&attempt)?;
    let stdio = attempt.worker(0, 3)?;
    let (out, err) = (writer(stdio.stdout)?, writer(stdio.stderr)?);
    let mut command = Command::new("sh");
    command
        .args(["-c", "echo out; echo err >&2; printf 'no newline'"])
        .stdout(Stdio::from(out))
        .stderr(Stdio::from(err));
    let mut child = command.spawn()?;
    drop(command); // closes our copies of its descriptors
    let (tee, stdout, stderr) = start(attempt)?;
    child.wait()?;
    tee.finish(soon());
    assert_eq!(stdout.text(), "[trainer0]:out\n[trainer0]:no newline");
    assert_eq!(stderr.text(), "[trainer0]:err\n");
    assert_eq!(fs::read_to_string(path.join("0/stdout.log"))?, "out\nno newline");
    Ok(())
}

#[test]
fn lines_are_shown_live_and_the_last_without_newline() -> Result {
    let mut config = config(LogDir::Disabled);
    config.tee = StreamChoice::All(STDOUT);
    let mut attempt = RunDir::create(&config, "job").attempt(0, 2);
    let mut zero = writer(attempt.worker(0, 0)?.stdout)?;
    let mut one = writer(attempt.worker(1, 1)?.stdout)?;
    let (tee, stdout, _) = start(attempt)?;
    writeln!(zero, "early")?;
    assert_eq!(stdout.wait_for("early\n", Duration::from_secs(10)), "[trainer0]:early\n");
    write!(zero, "loading ... \u{e4}")?; // shown after PARTIAL_AFTER
    let text = stdout.wait_for("loading ... ä", Duration::from_secs(20));
    assert_eq!(text, "[trainer0]:early\n[trainer0]:loading ... ä");
    writeln!(one, "between")?;
    stdout.wait_for("between\n", Duration::from_secs(10));
    writeln!(zero, "done")?;
    drop((zero, one));
    tee.finish(soon());
    let wanted = "[trainer0]:early\n[trainer0]:loading ... ä\n[trainer1]:between\n[trainer0]:done\n";
    assert_eq!(stdout.text(), wanted);
    Ok(())
}

#[test]
fn prefix_template_supports_four_names() -> Result {
    let mut config = config(LogDir::Disabled);
    config.prefix_template = "<${role_name}|$local_rank|${rank}|${hostname}|${x}|$$> ".to_owned();
    assert_eq!(prefix(&config, "node7", 1, 9), b"<trainer|1|9|node7|${x}|$> ");
    Ok(())
}

#[test]
fn filters_copy_matching_lines_with_prefix() -> Result {
    let (_temp, mut config) = logs_in_temp()?;
    config.tee = StreamChoice::All(BOTH);
    config.duplicate_stdout = vec!["apple".to_owned(), "a,b".to_owned()];
    let mut attempt = RunDir::create(&config, "job").attempt(0, 1);
    let path = path_of(&attempt)?;
    assert_eq!(fs::read_to_string(path.join("filtered_stdout.log"))?, "", "there from the start");
    let stdio = attempt.worker(0, 0)?;
    let (mut out, mut err) = (writer(stdio.stdout)?, writer(stdio.stderr)?);
    let (tee, _, _) = start(attempt)?;
    write!(out, "pineapple\npear\nxa,bx\na,,b\napple at the end")?;
    writeln!(err, "apple")?;
    drop((out, err));
    tee.finish(soon());
    let filtered = fs::read_to_string(path.join("filtered_stdout.log"))?;
    assert_eq!(filtered, "[trainer0]:pineapple\n[trainer0]:xa,bx\n[trainer0]:apple at the end\n");
    assert!(!path.join("filtered_stderr.log").exists());
    Ok(())
}

#[test]
fn invalid_utf8_is_replaced_on_the_console_only() -> Result {
    let (_temp, mut config) = logs_in_temp()?;
    config.tee = StreamChoice::All(STDOUT);
    let mut attempt = RunDir::create(&config, "job").attempt(0, 1);
    let path = path_of(&attempt)?;
    let mut out = writer(attempt.worker(0, 0)?.stdout)?;
    let (tee, stdout, _) = start(attempt)?;
    out.write_all(b"caf\xe9\r\n50%\r100%\n")?;
    drop(out);
    tee.finish(soon());
    assert_eq!(stdout.text(), "[trainer0]:caf\u{fffd}\n[trainer0]:50%\n[trainer0]:100%\n");
    assert_eq!(fs::read(path.join("0/stdout.log"))?, b"caf\xe9\r\n50%\r100%\n");
    Ok(())
}

#[test]
fn eight_workers_at_full_speed_keep_whole_lines() -> Result {
    const LINES: usize = 20_000;
    let (_temp, mut config) = logs_in_temp()?;
    config.tee = StreamChoice::All(STDOUT);
    let mut attempt = RunDir::create(&config, "job").attempt(0, 8);
    let path = path_of(&attempt)?;
    let filler = "x".repeat(500); // 80 MB in all
    let mut threads = Vec::new();
    for rank in 0..8 {
        let mut out = writer(attempt.worker(rank, rank)?.stdout)?;
        let filler = filler.clone();
        threads.push(std::thread::spawn(move || -> io::Result<()> {
            let mut block = Vec::new();
            for line in 0..LINES {
                writeln!(block, "{rank} {line} {filler}")?;
                if block.len() > 10_000 * (rank + 1) {
                    out.write_all(&block)?;
                    block.clear();
                }
            }
            out.write_all(&block)
        }));
    }
    let (tee, stdout, _) = start(attempt)?;
    for thread in threads {
        thread.join().map_err(|_| "a writer panicked")??;
    }
    tee.finish(soon());
    let text = stdout.text();
    let mut next = [0; 8];
    for line in text.lines() {
        let (prefix, rest) = line.split_once("]:").ok_or("no prefix")?;
        let mut words = rest.split(' ');
        let rank: usize = words.next().ok_or("no rank")?.parse()?;
        assert_eq!(prefix, format!("[trainer{rank}"));
        assert_eq!(
            (words.next(), words.next()),
            (Some(next[rank].to_string().as_str()), Some(filler.as_str()))
        );
        next[rank] += 1;
    }
    assert_eq!(next, [LINES; 8]);
    assert_eq!(fs::read_to_string(path.join("7/stdout.log"))?.lines().count(), LINES);
    Ok(())
}

#[test]
fn line_beyond_the_limit_is_split_but_complete() -> Result {
    let mut config = config(LogDir::Disabled);
    config.tee = StreamChoice::All(STDOUT);
    let mut attempt = RunDir::create(&config, "job").attempt(0, 1);
    let mut out = writer(attempt.worker(0, 0)?.stdout)?;
    let (tee, stdout, _) = start(attempt)?;
    let long = "y".repeat(5 * LINE_MAX_BYTES + 17);
    writeln!(out, "{long}")?;
    writeln!(out, "next")?;
    drop(out);
    tee.finish(soon());
    assert_eq!(stdout.text(), format!("[trainer0]:{long}\n[trainer0]:next\n"));
    Ok(())
}

#[test]
fn launcher_does_not_wait_for_descendants_holding_the_pipe() -> Result {
    let mut config = config(LogDir::Disabled);
    config.tee = StreamChoice::All(STDOUT);
    let mut attempt = RunDir::create(&config, "job").attempt(0, 1);
    let mut out = writer(attempt.worker(0, 0)?.stdout)?;
    let (tee, stdout, _) = start(attempt)?;
    write!(out, "last words")?;
    let deadline = Instant::now() + LONG;
    tee.finish(deadline);
    assert!(Instant::now() + LONG / 2 < deadline, "it waited for the pipe, which is still open");
    drop(out);
    assert_eq!(stdout.text(), "[trainer0]:last words");
    Ok(())
}

#[test]
fn output_of_an_endless_descendant_is_cut_off() -> Result {
    let mut config = config(LogDir::Disabled);
    config.tee = StreamChoice::All(STDOUT);
    let mut attempt = RunDir::create(&config, "job").attempt(0, 1);
    let out = writer(attempt.worker(0, 0)?.stdout)?;
    let lines = b"still here\n".repeat(10_000);
    let mut writing = Vec::new();
    for _ in 0..4 {
        let (mut out, lines) = (out.try_clone()?, lines.clone());
        writing.push(std::thread::spawn(move || while out.write_all(&lines).is_ok() {}));
    }
    drop(out);
    let (tee, _, _) = start(attempt)?;
    let deadline = Instant::now() + LONG;
    tee.finish(deadline);
    assert!(Instant::now() + LONG / 2 < deadline, "it read on as long as there was something");
    assert!(writing.into_iter().all(|thread| thread.join().is_ok()), "the pipe is closed");
    Ok(())
}

#[test]
fn endless_stream_is_read_only_for_a_limited_time() -> Result {
    let mut attempt = RunDir::create(&config(LogDir::Disabled), "job").attempt(0, 1);
    // No writer could always be faster than the reader.
    let endless = File::open("/dev/zero")?;
    attempt.sources = vec![Source::new(Stream::Stdout, endless.into(), None, Vec::new(), false)];
    let (tee, _, _) = start(attempt)?;
    let deadline = Instant::now() + LONG;
    tee.finish(deadline);
    assert!(Instant::now() + LONG / 2 < deadline, "it read on as long as there was something");
    Ok(())
}

/// A console that accepts nothing until it is released.
struct Stuck(std::sync::mpsc::Receiver<()>, Screen);

impl Write for Stuck {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = self.0.recv(); // at once when the sender is gone
        self.1.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn stopped_console_does_not_stop_the_workers() -> Result {
    let (_temp, mut config) = logs_in_temp()?;
    config.tee = StreamChoice::All(STDOUT);
    let mut attempt = RunDir::create(&config, "job").attempt(0, 1);
    let path = path_of(&attempt)?;
    let mut out = writer(attempt.worker(0, 0)?.stdout)?;
    let (let_go, stopped) = std::sync::mpsc::channel();
    let (screen, stderr) = (Screen::default(), Screen::default());
    let stall = Duration::from_millis(200);
    let stuck = Console::with_stall("stuck", Box::new(Stuck(stopped, screen.clone())), stall);
    let tee = attempt.start_tee_on([stuck, stderr.console()?])?;
    let line = [b"z".repeat(1023), b"\n".to_vec()].concat();
    for _ in 0..30_000 {
        out.write_all(&line)?; // 30 MB, far beyond what may wait
    }
    drop(let_go);
    // The console has taken what was kept for it.
    tee.drain(soon());
    writeln!(out, "after")?;
    drop(out);
    tee.finish(soon());
    assert_eq!(fs::metadata(path.join("0/stdout.log"))?.len(), 30_000 * 1024 + 6, "the file is complete");
    let text = screen.text();
    assert!(text.contains("bytes of output are missing here: the console accepted nothing\n"), "it says so");
    assert!(text.ends_with("[trainer0]:after\n"), "{}", &text[text.len() - 200..]);
    Ok(())
}

/// A slow console.
struct Slow(Screen);

impl Write for Slow {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        std::thread::sleep(Duration::from_millis(20));
        self.0.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn slow_console_gets_everything_even_after_the_deadline() -> Result {
    let mut config = config(LogDir::Disabled);
    config.tee = StreamChoice::All(STDOUT);
    let mut attempt = RunDir::create(&config, "job").attempt(0, 1);
    let mut out = writer(attempt.worker(0, 0)?.stdout)?;
    let (screen, stderr) = (Screen::default(), Screen::default());
    let tee =
        attempt.start_tee_on([Console::new("slow", Box::new(Slow(screen.clone()))), stderr.console()?])?;
    for line in 0..20_000 {
        writeln!(out, "{line} {}", "s".repeat(100))?;
    }
    drop(out);
    let started = Instant::now();
    tee.finish(started + Duration::from_millis(100));
    assert!(started.elapsed() > Duration::from_millis(200), "it was slow enough");
    assert_eq!(screen.text().lines().count(), 20_000);
    Ok(())
}

#[test]
fn stopped_console_does_not_delay_the_exit() -> Result {
    let mut config = config(LogDir::Disabled);
    config.tee = StreamChoice::All(STDOUT);
    let mut attempt = RunDir::create(&config, "job").attempt(0, 1);
    let mut out = writer(attempt.worker(0, 0)?.stdout)?;
    let (_let_go, stopped) = std::sync::mpsc::channel();
    let stuck = Console::new("stuck", Box::new(Stuck(stopped, Screen::default())));
    let tee = attempt.start_tee_on([stuck, Screen::default().console()?])?;
    writeln!(out, "never seen")?;
    drop(out);
    let started = Instant::now();
    tee.finish(started + Duration::from_millis(300));
    assert!(started.elapsed() < Duration::from_secs(2), "took {:?}", started.elapsed());
    Ok(())
}

/// A console that behaves like a pipe whose reader has left.
struct Broken;

impl Write for Broken {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn broken_stdout_is_reported_once_and_files_continue() -> Result {
    let (_temp, mut config) = logs_in_temp()?;
    config.tee = StreamChoice::All(STDOUT);
    let mut attempt = RunDir::create(&config, "job").attempt(0, 1);
    let path = path_of(&attempt)?;
    let mut out = writer(attempt.worker(0, 0)?.stdout)?;
    let stderr = Screen::default();
    let tee = attempt.start_tee_on([Console::new("broken", Box::new(Broken)), stderr.console()?])?;
    writeln!(out, "hello")?;
    tee.drain(soon());
    assert_eq!(stderr.text().lines().count(), 1, "told although nothing more came");
    for line in 1..200 {
        writeln!(out, "{line}")?;
    }
    drop(out);
    tee.finish(soon());
    assert_eq!(stderr.text(), "convoke: warning: cannot write to stdout: broken pipe; the job continues\n");
    assert_eq!(fs::read_to_string(path.join("0/stdout.log"))?.lines().count(), 200);
    Ok(())
}

#[test]
fn full_disk_is_reported_once_and_the_console_continues() -> Result {
    let mut config = config(LogDir::Disabled);
    config.tee = StreamChoice::All(STDOUT);
    let mut attempt = RunDir::create(&config, "job").attempt(0, 2);
    let mut outs = [writer(attempt.worker(0, 0)?.stdout)?, writer(attempt.worker(1, 1)?.stdout)?];
    for source in &mut attempt.sources {
        source.set_file(OpenOptions::new().write(true).open("/dev/full")?, "logs/0/stdout.log");
    }
    let (tee, stdout, stderr) = start(attempt)?;
    for line in 0..50 {
        for out in &mut outs {
            writeln!(out, "{line}")?;
        }
    }
    drop(outs);
    tee.finish(soon());
    assert_eq!(stdout.text().lines().count(), 100);
    let told = stderr.text();
    assert!(
        told.starts_with("convoke: warning: cannot write logs/0/stdout.log: No space left on device"),
        "{told}"
    );
    assert_eq!(told.lines().count(), 1);
    Ok(())
}

#[test]
fn tee_leaks_no_threads_or_descriptors() -> Result {
    let open = || names(Path::new("/proc/self/task")).map(|tasks| tasks.len());
    let mut config = config(LogDir::Disabled);
    config.tee = StreamChoice::All(STDOUT);
    let before = open()?;
    for _ in 0..50 {
        let mut attempt = RunDir::create(&config, "job").attempt(0, 1);
        let out = writer(attempt.worker(0, 0)?.stdout)?;
        let (tee, _, _) = start(attempt)?;
        drop(out);
        tee.finish(soon());
    }
    let end = soon();
    // Other tests have threads of their own, but not 50 more.
    while open()? > before + 40 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(open()? <= before + 40);
    Ok(())
}

#[test]
fn characters_stay_whole_in_lines_beyond_the_limit() {
    for character in ["é", "€", "😀"] {
        for before in 0..=4 {
            let text = "x".repeat(before) + &character.repeat(3 * LINE_MAX_BYTES / character.len() + 7);
            for step in [1000, LINE_MAX_BYTES - 1, LINE_MAX_BYTES, text.len()] {
                let chunks: Vec<&[u8]> = text.as_bytes().chunks(step).collect();
                let pieces: String = cut(&chunks).into_iter().map(|(piece, _)| piece).collect();
                assert!(pieces == text, "{character} after {before} bytes, read in steps of {step}");
            }
        }
    }
    // Bytes that form no character are passed on unchanged.
    let odd = [&vec![b'x'; LINE_MAX_BYTES - 2][..], b"\xff\x80\x80\x80\x80\n"].concat();
    let bytes: usize = cut(&[&odd]).iter().map(|(piece, _)| piece.chars().count()).sum();
    assert_eq!(bytes, odd.len() - 1);
}

#[test]
fn partial_line_with_an_invalid_byte_ends_at_a_character() {
    let mut lines = Lines::default();
    let mut shown = Vec::new();
    lines.feed(b"\xff caf\xc3", |_| {});
    lines.show_partial(|piece| shown.push(piece.text.to_vec()));
    lines.feed(b"\xa9\n", |piece| shown.push(piece.text.to_vec()));
    assert_eq!(shown, [b"\xff caf".to_vec(), b"\xc3\xa9".to_vec()]);
}

/// All text of the pieces, and what a reader of whole lines would see.
fn cut(chunks: &[&[u8]]) -> Vec<(String, bool)> {
    let mut lines = Lines::default();
    let mut out = Vec::new();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    for chunk in chunks {
        lines.feed(chunk, |piece| out.push((text(piece.line), piece.newline)));
    }
    lines.finish(|piece| out.push((text(piece.line), piece.newline)));
    out
}

#[test]
fn carriage_returns_end_lines_even_across_chunks() {
    let line = |text: &str| (text.to_owned(), true);
    assert_eq!(cut(&[b"a\r", b"\nb\r", b"c\r\n", b"\n"]), [line("a"), line("b"), line("c"), line("")]);
    assert_eq!(cut(&[b"a\r\rb", b""]), [line("a"), line(""), ("b".to_owned(), false)]);
}

#[test]
fn partial_line_is_shown_to_its_last_whole_character() {
    let mut lines = Lines::default();
    let mut shown = Vec::new();
    lines.feed(b"caf\xc3", |_| {});
    lines.show_partial(|piece| shown.push((piece.text.to_vec(), piece.complete)));
    lines.feed(b"\xa9 ole\n", |piece| shown.push((piece.text.to_vec(), piece.complete)));
    assert_eq!(shown, [(b"caf".to_vec(), false), (b"\xc3\xa9 ole".to_vec(), true)]);
    assert!(!lines.has_partial());
}

proptest! {
    /// Any division of the bytes into reads gives equal lines.
    #[test]
    fn lines_are_equal_for_any_chunks(text in "[ab\r\n]{0,60}", cuts in proptest::collection::vec(0usize..60, 0..6)) {
        let bytes = text.as_bytes();
        let mut at: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
        at.extend([0, bytes.len()]);
        at.sort_unstable();
        let chunks: Vec<&[u8]> = at.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
        let plain = text.replace("\r\n", "\n").replace('\r', "\n");
        let wanted: Vec<(String, bool)> = plain
            .split_inclusive('\n')
            .map(|line| (line.trim_end_matches('\n').to_owned(), line.ends_with('\n')))
            .collect();
        prop_assert_eq!(cut(&chunks), wanted);
    }
}

#[test]
fn pipe_read_end_returns_worker_output() -> Result {
    let (ours, theirs) = pipe()?;
    File::from(theirs).write_all(b"x")?;
    let mut text = String::new();
    File::from(ours).read_to_string(&mut text)?;
    assert_eq!(text, "x");
    Ok(())
}

/// A run whose workers' stderr passes through, as without a terminal.
fn passing_through(
    terminal: bool,
    change: impl FnOnce(&mut LogConfig),
) -> Result<(tempfile::TempDir, RunDir)> {
    let (temp, mut config) = logs_in_temp()?;
    config.keep_stderr_tail = true;
    change(&mut config);
    let run = RunDir::create_on(&config, "job", terminal);
    Ok((temp, run))
}

#[test]
fn stderr_passes_through_unless_redirected() -> Result {
    let redirect = |config: &mut LogConfig| config.redirects = StreamChoice::All(BOTH);
    let filter = |config: &mut LogConfig| config.local_ranks_filter = Some(BTreeSet::from([7]));
    let kinds = |run: &RunDir| {
        let stdio = run.attempt(0, 1).worker(0, 0)?;
        Result::Ok((kind(&stdio.stdout), kind(&stdio.stderr)))
    };
    let (_temp, run) = passing_through(false, |_| {})?;
    assert_eq!(kinds(&run)?, ("inherit", "pipe"));
    let (_temp, run) = passing_through(true, |_| {})?;
    let mut attempt = run.attempt(0, 1);
    let stdio = attempt.worker(0, 0)?;
    assert_eq!((kind(&stdio.stdout), kind(&stdio.stderr)), ("inherit", "pipe"));
    assert!(stdio.stderr.as_fd().is_some_and(|fd| fd.is_terminal()), "a terminal where the console is one");
    let (_temp, run) = passing_through(false, redirect)?;
    assert_eq!(kinds(&run)?, ("file", "file"));
    let (_temp, run) = passing_through(true, filter)?;
    assert_eq!(kinds(&run)?, ("null", "pipe"), "shown nowhere, but known");
    let nowhere = |config: &mut LogConfig| {
        redirect(config);
        config.dir = LogDir::Disabled;
    };
    let (_temp, run) = passing_through(false, nowhere)?;
    assert_eq!(kinds(&run)?, ("null", "null"));
    Ok(())
}

#[test]
fn passed_through_output_is_unchanged_and_prompt() -> Result {
    let (_temp, run) = passing_through(false, |_| {})?;
    let mut attempt = run.attempt(0, 1);
    let stdio = attempt.worker(0, 0)?;
    let (tee, _, stderr) = start(attempt)?;
    let mut worker = writer(stdio.stderr)?;
    worker.write_all(b"50 %\r")?;
    assert_eq!(stderr.wait_for("50 %\r", Duration::from_secs(20)), "50 %\r");
    worker.write_all(b"no newline, \xff\x1b[1m \r\n")?;
    worker.write_all(b"prompt> ")?;
    assert!(stderr.wait_for("prompt> ", Duration::from_secs(20)).ends_with("prompt> "));
    worker.write_all(b"end")?;
    tee.drain(soon());
    let raw = || stderr.0.lock().map(|bytes| bytes.clone()).unwrap_or_default();
    assert_eq!(raw(), b"50 %\rno newline, \xff\x1b[1m \r\nprompt> end");
    // A child of the worker goes on.
    worker.write_all(b", and more\n")?;
    assert!(stderr.wait_for("and more\n", Duration::from_secs(20)).ends_with("end, and more\n"));
    assert!(stdio.stderr_tail.read().0.ends_with(b"prompt> end, and more\n"));
    tee.finish(soon());
    assert!(worker.write_all(b"x").is_err(), "closed");
    Ok(())
}

#[test]
fn passed_through_lines_stay_whole_at_full_speed() -> Result {
    const WORKERS: usize = 8;
    const LINES: usize = 20_000;
    let (_temp, run) = passing_through(false, |_| {})?;
    let mut attempt = run.attempt(0, WORKERS);
    let mut writers = Vec::new();
    let mut tails = Vec::new();
    for rank in 0..WORKERS {
        let stdio = attempt.worker(rank, rank)?;
        tails.push(stdio.stderr_tail);
        writers.push(writer(stdio.stderr)?);
    }
    let (tee, _, stderr) = start(attempt)?;
    let threads: Vec<_> = writers
        .into_iter()
        .enumerate()
        .map(|(rank, mut worker)| {
            std::thread::spawn(move || {
                let line = |line| format!("{rank} {line} {}\n", "x".repeat(line % 97));
                let lines: Vec<String> = (0..LINES).map(line).collect();
                lines.chunks(17).try_for_each(|lines| worker.write_all(lines.concat().as_bytes()))
            })
        })
        .collect();
    for thread in threads {
        thread.join().map_err(|_| "a writer panicked")??;
    }
    tee.finish(soon());
    let text = stderr.text();
    let mut next = [0; WORKERS];
    for line in text.lines() {
        let mut words = line.split(' ');
        let mut number = || words.next().and_then(|word| word.parse::<usize>().ok());
        let (rank, at) = number().zip(number()).ok_or_else(|| line.to_owned())?;
        assert_eq!((at, words.next().map(str::len)), (next[rank], Some(at % 97)), "{line}");
        next[rank] += 1;
    }
    assert_eq!(next, [LINES; WORKERS]);
    for (rank, tail) in tails.iter().enumerate() {
        let (bytes, cut) = tail.read();
        let last = format!("\n{rank} {} {}\n", LINES - 1, "x".repeat((LINES - 1) % 97));
        assert!(cut && bytes.ends_with(last.as_bytes()));
    }
    Ok(())
}

#[test]
fn last_lines_of_one_worker_are_read_despite_another_flooding() -> Result {
    let (_temp, run) = passing_through(false, |_| {})?;
    let mut attempt = run.attempt(0, 2);
    let (dead, noisy) = (attempt.worker(0, 0)?, attempt.worker(1, 1)?);
    let (tee, _, _) = start(attempt)?;
    let mut endless = writer(noisy.stderr)?;
    // Ends when the pipe is closed.
    let noise = std::thread::spawn(move || while endless.write_all(&[b'n'; 4096]).is_ok() {});
    let mut last = writer(dead.stderr)?;
    for round in 0..50 {
        last.write_all(format!("{}last {round}\n", "x".repeat(50_000)).as_bytes())?;
        tee.read_pending(Duration::from_secs(20));
        let wanted = format!("xlast {round}\n");
        assert!(dead.stderr_tail.read().0.ends_with(wanted.as_bytes()));
    }
    drop(last);
    tee.drain(soon());
    tee.finish(soon());
    noise.join().map_err(|_| "the writer panicked")?;
    Ok(())
}
