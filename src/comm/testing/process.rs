//! Ranks as processes, started with torchrun's variables but without a launcher. For tests of other packages as well.

use std::process::{Child, Command, Output, Stdio};

/// Ends the process when a test fails half-way.
pub(crate) struct Process(Option<Child>);

impl Process {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(Some(command.spawn().unwrap()))
    }

    /// The process, while it runs.
    #[allow(dead_code)]
    pub(crate) fn child(&mut self) -> &mut Child {
        self.0.as_mut().unwrap()
    }

    /// What it has said in the end.
    pub(crate) fn wait(mut self) -> Output {
        self.0.take().unwrap().wait_with_output().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// `program` with nothing of a job that this test may itself run in, but for the gate's mark on its processes; its
/// output in pipes.
pub(crate) fn program(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    let begins = ["TORCHELASTIC_", "CONVOKE_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_"];
    let of_a_job = |name: &String| begins.iter().any(|begin| name.starts_with(begin));
    for (name, _) in std::env::vars().filter(|(name, _)| of_a_job(name) && name != "CONVOKE_CHECK_RUN") {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Makes `command` a rank of a job whose store, as an agent's, outlives any rank.
pub(crate) fn as_rank(command: &mut Command, rank: usize, world: usize, port: u16) {
    command
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", world.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env("TORCHELASTIC_USE_AGENT_STORE", "True");
}
