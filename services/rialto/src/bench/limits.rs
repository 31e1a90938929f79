//! What this machine and these libraries can do at best: bare servers. What the store can do at best is measured by
//! the kernel bench of `libs/store`.

use std::{net::SocketAddr, time::Duration};

use anyhow::ensure;
use axum::{Json, Router, routing::post};
use serde_json::Value;
use tokio::{net::TcpListener, task::JoinSet, time::Instant};
use tonic::{service::Routes, transport::Endpoint};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use super::{Bench, line, load::Figures, say, send, servers::Servers};
use crate::output;

/// A JSON echo on axum and a health check on tonic, on one port: the least that servers on these libraries can do.
pub(super) async fn serve() -> anyhow::Result<()> {
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
    output::line(&format!("ready: http://{}", listener.local_addr()?))?;
    let (_reporter, health) = tonic_health::server::health_reporter();
    let echo = Router::new().route("/", post(async |Json(body): Json<Value>| Json(body)));
    Ok(axum::serve(listener, Routes::new(health).into_axum_router().merge(echo)).await?)
}

pub(super) async fn measure(bench: &Bench) -> anyhow::Result<()> {
    let bare = Servers::alone("bare", &["bench", "--bare"]).await?;
    say("## limits\n")?;
    bench.title(&bare)?;
    let echo = super::Call { expect: "hello", ..send("hello") };
    bench.row(&bare, "bare axum, JSON echo", &echo).await?;
    for &connections in &bench.connections {
        let before = bare.cpu()?;
        let figures = calls(&bare.address, connections, Duration::from_secs(bench.seconds)).await?;
        let cpu: Vec<_> = bare.cpu()?.iter().zip(before).map(|(after, before)| after.saturating_sub(before)).collect();
        say(&line("bare tonic, unary", connections, &figures, &cpu))?;
    }
    Ok(())
}

/// Health checks over and over, one at a time on each connection.
async fn calls(address: &str, connections: usize, period: Duration) -> anyhow::Result<Figures> {
    let started = Instant::now();
    let mut workers = JoinSet::new();
    for _ in 0..connections {
        let address = format!("http://{address}");
        workers.spawn(async move {
            let mut client = HealthClient::new(Endpoint::new(address)?.connect().await?);
            let mut latencies = Vec::new();
            while started.elapsed() < period {
                let sent = Instant::now();
                let answer = client.check(HealthCheckRequest { service: String::new() }).await?.into_inner();
                ensure!(answer.status() == ServingStatus::Serving, "not serving");
                latencies.push(sent.elapsed());
            }
            Ok(latencies)
        });
    }
    let mut latencies = Vec::new();
    while let Some(more) = workers.join_next().await {
        latencies.extend(more??);
    }
    Ok(Figures::new(latencies, started.elapsed()))
}
