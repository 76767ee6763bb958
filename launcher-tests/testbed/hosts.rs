//! Simulated hosts on this machine; `hosts.sh` sets them up.

use std::io::{self, PipeReader, PipeWriter};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Hosts h1 to hN and the switch h0. They end when this value is dropped, or when this process ends.
#[derive(Debug)]
pub struct Hosts {
    state: tempfile::TempDir,
    orphan_guard: PipeReader,
    /// The write end of the pipe; the hosts end when it closes.
    orphan_guard_writer: Option<PipeWriter>,
}

impl Hosts {
    /// Brings up `count` hosts.
    ///
    /// # Errors
    /// Returns the reason why this machine cannot have simulated hosts.
    pub fn up(count: usize) -> Result<Self, String> {
        if let Some(why) = missing_requirement(&["ip", "nsenter", "unshare", "pgrep"]) {
            return Err(why);
        }
        let state = tempfile::Builder::new().prefix("convoke-hosts-").tempdir();
        let state = state.map_err(|error| error.to_string())?;
        let (orphan_guard, orphan_guard_writer) = io::pipe().map_err(|error| error.to_string())?;
        let hosts = Self { state, orphan_guard, orphan_guard_writer: Some(orphan_guard_writer) };
        let up = hosts.command(["up", &count.to_string()]).output();
        text(up).map(|_| hosts)
    }

    /// Brings up `count` hosts whose links can be slow, lossy or cut in one direction: `delay`, `mute` and
    /// `deaf` of `hosts.sh`.
    ///
    /// # Errors
    /// Returns an error if [`Self::up`] does, or if the machine has no tap devices.
    pub fn up_with_tap_links(count: usize) -> Result<Self, String> {
        Self::check_tap_links()?;
        Self::up(count)
    }

    /// Checks that `delay`, `mute` and `deaf` of `hosts.sh` work on this machine.
    ///
    /// # Errors
    /// Says what is missing and how to get it.
    pub fn check_tap_links() -> Result<(), String> {
        let tap = std::fs::File::options().read(true).write(true).open("/dev/net/tun");
        let remedy = "`modprobe tun` on the machine, and in a container `docker run --device /dev/net/tun`";
        tap.map(drop).map_err(|error| format!("no tap devices: /dev/net/tun: {error}; {remedy}"))
    }

    /// Builds a `hosts.sh` command with these arguments for these hosts.
    pub fn command<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = Command::new(Self::script());
        let arguments: Vec<_> = arguments.into_iter().collect();
        if arguments.first() != Some(&"exec")
            && let Ok(orphan_guard) = self.orphan_guard.try_clone()
        {
            command.env("TESTBED_LEASH", "1").stdin(orphan_guard);
        }
        command.args(arguments).env("TESTBED_DIR", self.state_dir());
        command
    }

    /// Runs `hosts.sh` with these arguments and returns its output.
    ///
    /// # Errors
    /// Returns the error output of `hosts.sh`.
    pub fn run_script<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Result<String, String> {
        text(self.command(arguments).output())
    }

    /// Closes the pipe, as the kernel does when this process is killed; the hosts then end by themselves.
    pub fn close_orphan_guard(&mut self) {
        self.orphan_guard_writer = None;
    }

    /// The TESTBED_DIR of these hosts.
    #[must_use]
    pub fn state_dir(&self) -> &Path {
        self.state.path()
    }

    /// The path of `hosts.sh`.
    #[must_use]
    pub fn script() -> PathBuf {
        convoke_testkit::programs::repository_root().join("launcher-tests/testbed/hosts.sh")
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        let _ = self.command(["down"]).output();
    }
}

fn text(output: io::Result<Output>) -> Result<String, String> {
    let output = output.map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// Returns the reason why tests that need root and these programs cannot run here; `None` if they can.
#[must_use]
pub fn missing_requirement(tools: &[&str]) -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("not root".to_owned());
    }
    let there = |tool: &str| {
        let look = Command::new("sh").args(["-c", &format!("command -v {tool}")]).output();
        look.is_ok_and(|output| output.status.success())
    };
    tools.iter().find(|tool| !there(tool)).map(|missing| format!("no program {missing}"))
}
